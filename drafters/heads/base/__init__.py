"""What draft heads share: the call, its state and inputs, growth of trees, recorded drafts, drafts in C."""
