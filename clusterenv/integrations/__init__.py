"""Optional bridges to other frameworks; each module needs the package that it is named after."""
