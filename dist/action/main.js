// Runs the script `start` with the inputs in its environment.
const { spawnSync } = require('child_process');
const { status } = spawnSync('bash', [`${__dirname}/start`], { stdio: 'inherit' });
process.exitCode = status === null ? 1 : status;
