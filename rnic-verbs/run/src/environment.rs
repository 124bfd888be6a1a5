//! The environment through which a program finds the libraries, the daemon and its devices.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::daemon::SOCKET_VARIABLE;
use crate::libraries::{self, PATH_VARIABLE};
use crate::preload::{self, LIST_VARIABLE, SANITIZER_VARIABLE, TREE_VARIABLE};

/// Environment variable with the devices for the libraries.
pub const DEVICES_VARIABLE: &str = "RNIC_DEVICES";

/// Libraries, daemon and devices of a program.
#[derive(Debug)]
pub struct Environment<'a> {
    /// Directory of the libraries.
    pub libraries: &'a Path,
    /// Path of this directory for the program, which may run in a container.
    pub libraries_in_program: &'a Path,
    /// The daemon's socket, unless the program finds it without the variable.
    pub socket: Option<OsString>,
    /// Directory with the device files, if there is one.
    pub tree: Option<PathBuf>,
    /// Devices of the program; `None` leaves the variable unchanged.
    pub devices: Option<OsString>,
}

impl Environment<'_> {
    /// Returns the variables to set. `inherited` returns the program's current value of a variable.
    pub fn variables(
        self,
        inherited: impl Fn(&str) -> Option<OsString>,
    ) -> Vec<(&'static str, OsString)> {
        let folder = self.libraries_in_program;
        let path = libraries::path_with(folder, inherited(PATH_VARIABLE).as_deref());
        let mut all = vec![(PATH_VARIABLE, path)];
        if let Some(libraries) = preload::libraries(self.libraries, folder) {
            let list = preload::list_with(&libraries, inherited(LIST_VARIABLE).as_deref());
            let options = preload::sanitizer_options(inherited(SANITIZER_VARIABLE).as_deref());
            all.extend([(LIST_VARIABLE, list), (SANITIZER_VARIABLE, options)]);
        }
        // Without the variable, the preload library would show the files of the system's daemon.
        all.push((TREE_VARIABLE, self.tree.map_or_else(OsString::new, OsString::from)));
        all.extend(self.devices.map(|names| (DEVICES_VARIABLE, names)));
        all.extend(self.socket.map(|socket| (SOCKET_VARIABLE, socket)));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_those_of_the_program() {
        let here = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        std::fs::write(here.path().join("libibverbs.so.1"), "").unwrap_or_else(|e| panic!("{e}"));
        let variables = |folder: &str| {
            let environment = Environment {
                libraries: here.path(),
                libraries_in_program: Path::new(folder),
                socket: Some("/run/rnicd/rnicd.sock".into()),
                tree: None,
                devices: None,
            };
            let all = environment.variables(|name| (name == PATH_VARIABLE).then(|| "/own".into()));
            let text = |(name, value): &(&str, OsString)| format!("{name}={}", value.display());
            all.iter().map(text).collect::<Vec<_>>()
        };
        assert_eq!(
            variables("/there"),
            [
                "LD_LIBRARY_PATH=/there:/own",
                "LD_PRELOAD=/there/libibverbs.so.1",
                "ASAN_OPTIONS=verify_asan_link_order=0",
                "RNIC_TREE=",
                "RNIC_SOCKET=/run/rnicd/rnicd.sock",
            ]
        );
        // The path cannot be in LD_PRELOAD.
        let without =
            ["LD_LIBRARY_PATH=/a b:/own", "RNIC_TREE=", "RNIC_SOCKET=/run/rnicd/rnicd.sock"];
        assert_eq!(variables("/a b"), without);
    }
}
