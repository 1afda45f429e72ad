CUDA: tuple = ()
