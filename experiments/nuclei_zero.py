# The trainings of nuclei.py, compared with the paper's method: give its --work-dir, and nothing is trained twice.
_base_ = './nuclei.py'
compare = dict.fromkeys(['nearest', 'pool', 'pool-objects', 'nearest-objects'], 'zero')
