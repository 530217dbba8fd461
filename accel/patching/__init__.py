"""What a change to a model is: rules that find sites, forwards that take over, patches that are undone exactly."""
