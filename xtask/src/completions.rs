//! Completions of shells.

use std::path::Path;

use clap_complete::Shell;

use crate::{Failure, programs};

/// Shells, each with the folder that it searches below `/usr/share`.
const SHELLS: [(Shell, &str); 3] = [
    (Shell::Bash, "bash-completion/completions"),
    (Shell::Zsh, "zsh/site-functions"),
    (Shell::Fish, "fish/vendor_completions.d"),
];

/// Writes the completions of all programs below a folder.
pub fn write(folder: &Path) -> Result<(), Failure> {
    for (shell, below) in SHELLS {
        let folder = folder.join(below);
        std::fs::create_dir_all(&folder).map_err(Failure::at(&folder))?;
        for program in programs() {
            let name = program.command.get_name().to_owned();
            let mut command = program.command;
            let file = clap_complete::generate_to(shell, &mut command, &name, &folder)
                .map_err(Failure::at(&folder))?;
            if shell == Shell::Bash {
                // bash-completion loads a file by the name of the program.
                let to = folder.join(name);
                std::fs::rename(file, &to).map_err(Failure::at(&to))?;
            }
        }
    }
    Ok(())
}
