// After a failed job, prints what the daemon knows about it.
const { spawnSync } = require('child_process');
spawnSync('bash', [`${__dirname}/report`], { stdio: 'inherit' });
