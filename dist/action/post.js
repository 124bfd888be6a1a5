// After a failed job, prints the daemon's failures, events, status and log.
const { spawnSync } = require('child_process');
spawnSync('bash', [`${__dirname}/report`], { stdio: 'inherit' });
