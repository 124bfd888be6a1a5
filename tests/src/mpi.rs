//! An MPI job of Open MPI: with UCX over the RoCE device, or with libfabric over the iWARP device.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::apart::{Apart, Side};
use crate::{Daemon, built, in_path, omit};

/// A program that runs MPI collectives and compares their results.
pub struct Collectives {
    program: PathBuf,
    folder: TempDir,
}

impl Collectives {
    /// Compiles the program. Without Open MPI, reports a skipped test and returns `None`.
    ///
    /// # Panics
    ///
    /// If the build fails.
    pub fn build() -> Option<Self> {
        if !in_path("mpicc") || !in_path("mpirun") {
            omit("no mpicc here: Debian package libopenmpi-dev");
            return None;
        }
        let folder = tempfile::tempdir().expect("a temporary directory");
        let program = folder.path().join("collectives");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("verbs/collectives.c");
        let built = Command::new("mpicc").arg("-o").arg(&program).arg(source).status();
        assert!(built.expect("mpicc runs").success(), "the program cannot be built");
        Some(Collectives { program, folder })
    }

    /// Returns a command that runs the job over the RoCE device with fault rules in each rank. The
    /// job prints that the ranks agree.
    pub fn command(&self, daemon: &Daemon, ranks: u32, rules: &str) -> Command {
        let mut command = Command::new("mpirun");
        command.args(["--mca", "pml", "ucx", "--mca", "opal_common_ucx_tls", "any"]);
        command.args(["--mca", "opal_common_ucx_devices", "any"]);
        command.args(["-x", "UCX_TLS=rc_verbs,ud_verbs:aux,self"]);
        self.complete(command, "rnicd1", daemon, ranks, rules)
    }

    /// Like [`command`](Self::command), over the iWARP device. The daemon must run on this host:
    /// libfabric uses no loopback interface.
    pub fn over_iwarp(&self, host: &Apart, daemon: &Daemon, ranks: u32, rules: &str) -> Command {
        let mut command = host.on(Side::A);
        command.args(["mpirun", "--mca", "pml", "cm", "--mca", "mtl", "ofi"]);
        command.args(["--mca", "mtl_ofi_provider_include", "verbs;ofi_rxm"]);
        command.args(["--mca", "btl", "self"]);
        self.complete(command, "rnicd0", daemon, ranks, rules)
    }

    fn complete(
        &self,
        mut command: Command,
        device: &str,
        daemon: &Daemon,
        ranks: u32,
        rules: &str,
    ) -> Command {
        command.args(["--oversubscribe", "-np", &ranks.to_string(), "--mca", "plm", "isolated"]);
        command.arg(built::program("rnic-run")).args(["--no-start", "--devices", device]);
        command.arg("--lib-dir").arg(built::libraries()).arg(&self.program);
        command.env("RNIC_SOCKET", daemon.socket()).env("RNIC_FAULTS", rules);
        command.env("TMPDIR", self.folder.path()).process_group(0);
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        command
    }
}
