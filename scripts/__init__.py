"""Questions asked from the command line. Nothing else imports from here."""
