"""Tasks that come with mmjax: `registry` has an entry for each, and those with code of their own have a folder."""
