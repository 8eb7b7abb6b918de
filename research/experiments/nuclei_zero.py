# The trainings of nuclei.py, compared with the paper's method: give its --work-dir, and nothing is trained twice.
_base_ = './nuclei.py'
compare = dict.fromkeys(['random', 'nearest', 'pool', 'pool-objects', 'nearest-objects'], 'zero')
