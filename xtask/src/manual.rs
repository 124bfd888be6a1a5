//! Manual pages: one for each program, with its commands, and one for the configuration file.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Command;
use clap_mangen::Man;
use roff::{Roff, roman};

use crate::{Failure, Program, config_page, programs};

/// Writes all pages below a folder, in `man1`, `man5` and `man8`.
pub fn write(folder: &Path) -> Result<(), Failure> {
    for (path, text) in pages() {
        let path = folder.join(path);
        let parent = path.parent().unwrap_or(folder);
        std::fs::create_dir_all(parent).map_err(Failure::at(parent))?;
        std::fs::write(&path, text).map_err(Failure::at(&path))?;
    }
    Ok(())
}

/// Returns each page with its path below the folder of the manual.
pub fn pages() -> Vec<(PathBuf, Vec<u8>)> {
    let path = |name: &str, section: &str| PathBuf::from(format!("man{section}/{name}.{section}"));
    let mut all = vec![(path("rnicd.toml", "5"), config_page::page().into_bytes())];
    for program in programs() {
        let (name, section) = (program.command.get_name().to_owned(), program.section);
        let mut page = Vec::new();
        // Writing to a vector does not fail.
        if of_program(program, &mut page).is_ok() {
            all.push((path(&name, section), page));
        }
    }
    all
}

fn of_program(program: Program, to: &mut Vec<u8>) -> io::Result<()> {
    let Program { command, section, see_also } = program;
    let commands = leaves(&command, command.get_name());
    let has_examples = command.get_after_help().is_some();
    let source = format!("rnicd {}", command.get_version().unwrap_or_default());
    let command = command.disable_help_flag(true).disable_version_flag(true);
    let page = Man::new(command.subcommand_value_name("command"))
        .section(section)
        .source(source)
        // An empty date: the same source makes the same page.
        .date("")
        .manual("rnicd");
    page.render_title(to)?;
    page.render_name_section(to)?;
    page.render_synopsis_section(to)?;
    page.render_description_section(to)?;
    page.render_options_section(to)?;
    if !commands.is_empty() {
        heading("COMMANDS").to_writer(to)?;
        for command in commands {
            of_command(command, to)?;
        }
    }
    if has_examples {
        let mut extra = Vec::new();
        page.render_extra_section(&mut extra)?;
        let extra = String::from_utf8_lossy(&extra);
        to.write_all(extra.replace("SH EXTRA\nExamples:\n", "SH EXAMPLES\n").as_bytes())?;
    }
    let mut also = heading("SEE ALSO");
    also.text([roman(see_also.join(", "))]);
    also.to_writer(to)
}

/// Writes a command of a program: usage, description and options.
fn of_command(command: Command, to: &mut Vec<u8>) -> io::Result<()> {
    let page = Man::new(command);
    let mut parts = [Vec::new(), Vec::new(), Vec::new()];
    page.render_synopsis_section(&mut parts[0])?;
    page.render_description_section(&mut parts[1])?;
    page.render_options_section(&mut parts[2])?;
    // Each part starts with a heading, which belongs to a page of its own.
    let [synopsis, description, options] = parts.map(|part| without_heading(&part).to_vec());
    to.write_all(b".TP\n")?;
    to.write_all(&synopsis)?;
    // A paragraph of a list entry is indented.
    let description = String::from_utf8_lossy(&description).replace(".PP\n", ".IP\n");
    to.write_all(description.as_bytes())?;
    if !options.is_empty() {
        to.write_all(b".RS\n")?;
        to.write_all(&options)?;
        to.write_all(b".RE\n")?;
    }
    Ok(())
}

/// Returns the visible commands below a command that have none themselves, by their full names.
fn leaves(command: &Command, name: &str) -> Vec<Command> {
    let shown = command.get_subcommands().filter(|command| !command.is_hide_set());
    shown
        .flat_map(|command| {
            let name = format!("{name} {}", command.get_name());
            if command.has_subcommands() {
                return leaves(command, &name);
            }
            vec![command.clone().bin_name(name).disable_help_flag(true)]
        })
        .collect()
}

fn without_heading(part: &[u8]) -> &[u8] {
    let starts = |at: &usize| part.get(*at..).is_some_and(|rest| rest.starts_with(b".SH"));
    match (0..part.len()).find(starts) {
        Some(at) => match part[at..].iter().position(|byte| *byte == b'\n') {
            Some(end) => &part[at + end + 1..],
            None => &[],
        },
        None => part,
    }
}

pub(crate) fn heading(text: &str) -> Roff {
    let mut roff = Roff::new();
    roff.control("SH", [text]);
    roff
}
