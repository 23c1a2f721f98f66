"""Tasks that come with mmjax: `registry` has an entry for each; a task with code has a folder."""
