//! `modprobe` and `rmmod`: succeed for the kernel modules that rnicd replaces, and leave all other
//! work to the system's programs.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use crate::cli::complain;

/// Modules that programs do not need with rnicd, with underscores.
const REPLACED: [&str; 7] =
    ["rdma_rxe", "siw", "rdma_cm", "rdma_ucm", "ib_uverbs", "ib_core", "ib_umad"];

/// Options of `modprobe` with a separate value.
const WITH_VALUE: [&str; 6] = ["-C", "--config", "-d", "--dirname", "-S", "--set-version"];
/// Options of `modprobe` that do not load a module.
const OTHER_WORK: [&str; 10] = [
    "-c",
    "--showconfig",
    "-R",
    "--resolve-alias",
    "--show-exports",
    "--dump-modversions",
    "-V",
    "--version",
    "-h",
    "--help",
];

/// Runs `modprobe`.
pub fn modprobe(arguments: &[OsString]) -> ExitCode {
    let rest = of_modprobe(arguments);
    if rest.is_none() && has(&options(arguments), 'D', "--show-depends") {
        let names = arguments.iter().filter_map(|argument| argument.to_str());
        let lines = names.filter(|name| is_replaced(name)).map(|name| {
            // As kmod shows a module that is part of the kernel.
            format!("builtin {}\n", name.replace('-', "_"))
        });
        return crate::cli::print(&lines.collect::<String>()).unwrap_or(ExitCode::FAILURE);
    }
    answer("modprobe", rest)
}

/// Runs `rmmod`.
pub fn rmmod(arguments: &[OsString]) -> ExitCode {
    answer("rmmod", rest_of(arguments, &|_, _| true))
}

/// Returns the arguments for the system's `modprobe`, or `None` if nothing is left for it.
fn of_modprobe(arguments: &[OsString]) -> Option<Vec<OsString>> {
    let options = options(arguments);
    if options.iter().any(|option| OTHER_WORK.contains(option)) {
        return Some(arguments.to_vec());
    }
    // Without these, only the first name is a module, and its parameters follow.
    let all = has(&options, 'a', "--all") || has(&options, 'r', "--remove");
    rest_of(arguments, &|index, _| all || index == 0)
}

/// Returns the arguments before `--`.
fn options(arguments: &[OsString]) -> Vec<&str> {
    let options = arguments.iter().filter_map(|argument| argument.to_str());
    options.take_while(|option| *option != "--").collect()
}

/// Returns true if the options contain one, as a letter or as a word.
fn has(options: &[&str], short: char, long: &str) -> bool {
    options.iter().any(|option| {
        let letters = option.strip_prefix('-').filter(|rest| !rest.starts_with('-'));
        *option == long || letters.is_some_and(|letters| letters.contains(short))
    })
}

fn is_replaced(module: &str) -> bool {
    REPLACED.contains(&&*module.replace('-', "_"))
}

/// Removes the replaced modules from the arguments. `is_module` gets the position of a name and the
/// name. Returns `None` if no other module is left.
fn rest_of(
    arguments: &[OsString],
    is_module: &dyn Fn(usize, &str) -> bool,
) -> Option<Vec<OsString>> {
    let mut rest = Vec::new();
    let mut names = 0;
    let mut replaced = 0;
    let mut others = 0;
    let mut is_value = false;
    let mut only_names = false;
    for argument in arguments {
        let text = argument.to_string_lossy();
        if is_value || (!only_names && text.starts_with('-')) {
            is_value = !is_value && WITH_VALUE.contains(&&*text);
            only_names |= text == "--";
        } else {
            let counts = is_module(names, &text);
            names += 1;
            if counts && is_replaced(&text) {
                replaced += 1;
                continue;
            }
            others += usize::from(counts);
        }
        rest.push(argument.clone());
    }
    (replaced == 0 || others > 0).then_some(rest)
}

/// Succeeds if nothing is left to do, or replaces this process with the system's program.
fn answer(name: &str, rest: Option<Vec<OsString>>) -> ExitCode {
    let Some(arguments) = rest else { return ExitCode::SUCCESS };
    let why = match super::next_of_name(name) {
        Some(program) => {
            let error = Command::new(&program).args(&arguments).exec();
            format!("cannot run {}: {error}", program.display())
        }
        None => format!(
            "there is no other {name} in PATH, and rnicd's answers only for {}",
            REPLACED.join(", ")
        ),
    };
    complain(&format!("{name}: {why}"));
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        text.split_whitespace().map(OsString::from).collect()
    }

    #[test]
    fn modprobe_succeeds_for_replaced_modules() {
        for done in [
            "rdma_rxe",
            "siw",
            "-v rdma_rxe",
            "rdma-rxe",
            "-a rdma_rxe siw ib_uverbs",
            "-r siw",
            "-q ib_core debug=1",
            "-C /x ib_umad",
            "-rv rdma_cm rdma_ucm",
            "-- siw",
            "-n rdma_rxe",
            "-D rdma_rxe",
            "--show-depends -a siw rdma_cm",
        ] {
            assert_eq!(of_modprobe(&words(done)), None, "{done}");
        }
        for (given, rest) in [
            ("loop", "loop"),
            ("", ""),
            ("loop rdma_rxe", "loop rdma_rxe"),
            ("-a loop rdma_rxe", "-a loop"),
            ("-r siw nvme_rdma -v", "-r nvme_rdma -v"),
            ("-C siw loop", "-C siw loop"),
            ("--dirname=/x loop", "--dirname=/x loop"),
            ("--version", "--version"),
            ("-D loop", "-D loop"),
            ("mlx5_ib", "mlx5_ib"),
        ] {
            assert_eq!(of_modprobe(&words(given)), Some(words(rest)), "{given}");
        }
    }

    #[test]
    fn rmmod_takes_any_number_of_modules() {
        let rmmod = |text| rest_of(&words(text), &|_, _| true);
        assert_eq!(rmmod("-f rdma_rxe siw"), None);
        assert_eq!(rmmod("rdma_rxe loop"), Some(words("loop")));
        assert_eq!(rmmod("-V"), Some(words("-V")));
    }
}
