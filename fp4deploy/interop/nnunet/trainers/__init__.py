"""What nnU-Net finds in nnUNet_extTrainer; it imports the files of this folder by their names alone."""
