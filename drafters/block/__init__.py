"""Semi-autoregressive draft heads that predict several tokens per pass: FLASH, parallel, Falcon."""
