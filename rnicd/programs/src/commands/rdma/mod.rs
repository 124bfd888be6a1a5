//! `rdma`: shows the daemon's devices and objects in the format of iproute2's program, and adds and
//! removes devices.
//!
//! `devices` reads the daemon's device files, `resource` its tables (`rnic_client::rdma`), and
//! `output` formats both.

mod devices;
mod output;
mod resource;

use std::ffi::OsString;
use std::process::ExitCode;

use rnic_client::{Context, rdma};

use crate::cli::complain;
use devices::Device;
use output::{Object, Style};

type Failure = Box<dyn std::error::Error>;

const USAGE: &str = "\
Usage: rdma [ OPTIONS ] OBJECT { COMMAND | help }
where  OBJECT := { dev | link | resource | statistic | system | help }
       OPTIONS := { -V[ersion] | -d[etails] | -j[son] | -p[retty] }
Commands of rnicd's rdma:
       rdma link [ show [DEV/PORT] ]
       rdma link add NAME type rxe netdev NETDEV
       rdma link delete NAME
       rdma dev [ show [DEV] ]
       rdma resource [ show [DEV] ]
       rdma resource show { qp | cm_id | pd | mr | cq | ctx | srq } [ link DEV/PORT | dev DEV ]
                          [ NAME VALUE ]
       rdma statistic [ show [ link DEV/PORT ] ]
       rdma system [ show ]
";

/// Runs the command.
pub fn main(arguments: &[OsString]) -> ExitCode {
    match run(arguments) {
        Ok(code) => code,
        Err(error) => {
            complain(&format!("rdma: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[OsString]) -> Result<ExitCode, Failure> {
    let words: Vec<String> =
        arguments.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let (style, words) = match options(&words)? {
        Options::Run(style, words) => (style, words),
        Options::Print(text) => return crate::cli::print(&text),
    };
    let mut words = Words(&words);
    let objects = match words.choose(&["help", "dev", "link", "resource", "statistic", "system"])? {
        None | Some("help") => return crate::cli::print(USAGE),
        Some("dev") => {
            words.show(&["show", "list"])?;
            devices()?.iter().filter(words.device()?).map(Device::as_dev).collect()
        }
        Some("link") => match words.choose(&["add", "delete", "show", "list", "help"])? {
            Some("add") => return add(&mut words),
            Some("delete") => return delete(&mut words),
            Some("help") => return crate::cli::print(USAGE),
            _ => devices()?.iter().filter(words.device()?).map(|d| d.as_link(&style)).collect(),
        },
        Some("resource") => {
            words.show(&["show", "list"])?;
            resource(&mut words)?
        }
        Some("statistic") => {
            words.show(&["show", "list"])?;
            words.show(&["link"])?;
            devices()?.iter().filter(words.device()?).map(Device::as_statistic).collect()
        }
        _ => {
            words.show(&["show"])?;
            vec![Object::default().text("netns", "shared").text("copy-on-fork", "on")]
        }
    };
    words.end()?;
    crate::cli::print(&output::format(&objects, &style))
}

/// Returns the daemon's devices that programs see.
fn devices() -> Result<Vec<Device>, Failure> {
    devices::of(&Context::open()?)
}

fn resource(words: &mut Words<'_>) -> Result<Vec<Object>, Failure> {
    let context = Context::open()?;
    let all = devices::of(&context)?;
    let mut shown = resource::shown(&all);
    // Before a device of this name is looked for, as iproute2 does for a last word.
    let is_device = |word: &String| all.iter().any(|device| device.is_named(word));
    if words.0.len() <= 1 && words.0.first().is_none_or(is_device) {
        let wanted = words.device()?;
        shown.retain(|shown| wanted(&shown.device));
        return resource::summary(&context, &shown);
    }
    let kind = words.choose(&rdma::KINDS)?.unwrap_or_default();
    if words.choose(&["link", "dev"])?.is_some() {
        let wanted = words.device()?;
        shown.retain(|shown| wanted(&shown.device));
    }
    let filters = words.pairs();
    let objects = resource::list(&context, kind, &shown)?;
    Ok(objects.into_iter().filter(|object| object.matches(&filters)).collect())
}

/// Returns the error for a device that does not exist, or that programs do not see.
fn no_device(word: &str, hidden: Option<&Device>) -> Failure {
    let error = match hidden {
        Some(Device { name, .. }) => format!(
            "there is no device {word:?} for programs of this environment; RNIC_DEVICES={name} \
             shows it"
        ),
        None => format!("there is no device {word:?}; see rdma dev"),
    };
    error.into()
}

/// Adds a device.
fn add(words: &mut Words<'_>) -> Result<ExitCode, Failure> {
    let name = words.next("the name of the new link")?;
    words.keyword("type")?;
    let kind = words.next("the type of the link")?;
    words.keyword("netdev")?;
    let netdev = words.next("a network interface")?;
    words.end()?;
    if kind != "rxe" {
        return Err(format!(
            "link add: type {kind:?} is not supported: rnicd adds devices of type rxe; its iWARP \
             device always exists"
        )
        .into());
    }
    rdma::add_link(&Context::open()?, name, netdev)?;
    Ok(ExitCode::SUCCESS)
}

/// Removes a device.
fn delete(words: &mut Words<'_>) -> Result<ExitCode, Failure> {
    let name = words.next("the name of a link")?;
    words.end()?;
    Context::open()?.remove_device(name.split('/').next().unwrap_or(name))?;
    Ok(ExitCode::SUCCESS)
}

/// Result of the options before the object.
enum Options {
    Run(Style, Vec<String>),
    Print(String),
}

fn options(words: &[String]) -> Result<Options, Failure> {
    let mut style = Style::default();
    let mut rest = words;
    while let Some((word, after)) = rest.split_first().filter(|(word, _)| word.starts_with('-')) {
        rest = after;
        let letters: String = match word.as_str() {
            "--" => break,
            "--version" | "-Version" => "V".to_owned(),
            "--help" => "h".to_owned(),
            "--json" | "-json" => "j".to_owned(),
            "--pretty" | "-pretty" => "p".to_owned(),
            "--details" | "-details" => "d".to_owned(),
            "--raw" | "--oneline" | "-raw" => continue,
            letters => letters[1..].to_owned(),
        };
        for letter in letters.chars() {
            match letter {
                'j' => style.json = true,
                'p' => style.pretty = true,
                'd' => style.details = true,
                'r' | 'o' => {}
                'V' => {
                    let version = env!("CARGO_PKG_VERSION");
                    return Ok(Options::Print(format!("rdma utility, rnicd-{version}\n")));
                }
                'h' => return Ok(Options::Print(USAGE.to_owned())),
                _ => return Err(format!("unknown option {word:?}; see rdma help").into()),
            }
        }
    }
    Ok(Options::Run(style, rest.to_vec()))
}

/// The remaining words of a command.
struct Words<'a>(&'a [String]);

impl<'a> Words<'a> {
    /// Takes a word that is one of these, or the beginning of one. Fails for any other word.
    fn choose(&mut self, among: &[&'static str]) -> Result<Option<&'static str>, Failure> {
        let Some((word, rest)) = self.0.split_first() else { return Ok(None) };
        let found = among.iter().find(|name| name.starts_with(word.as_str()) && !word.is_empty());
        let found =
            found.ok_or_else(|| format!("unknown word {word:?}; expected {}", among.join(", ")))?;
        self.0 = rest;
        Ok(Some(found))
    }

    /// Takes one of these words, if it is next.
    fn show(&mut self, among: &[&'static str]) -> Result<(), Failure> {
        let is_next = |word: &String| {
            !word.is_empty() && among.iter().any(|name| name.starts_with(word.as_str()))
        };
        if self.0.first().is_some_and(is_next) {
            self.choose(among)?;
        }
        Ok(())
    }

    fn next(&mut self, what: &str) -> Result<&'a str, Failure> {
        let (word, rest) =
            self.0.split_first().ok_or_else(|| format!("{what} is missing; see rdma help"))?;
        self.0 = rest;
        Ok(word)
    }

    fn keyword(&mut self, keyword: &str) -> Result<(), Failure> {
        let word = self.next(&format!("`{keyword}`"))?;
        if keyword.starts_with(word) && !word.is_empty() {
            Ok(())
        } else {
            Err(format!("unknown word {word:?}; expected {keyword}").into())
        }
    }

    /// Takes a device name, if one is next. Returns which devices are meant.
    fn device(&mut self) -> Result<impl Fn(&&Device) -> bool + use<>, Failure> {
        let wanted = self.0.split_first().map(|(word, rest)| {
            self.0 = rest;
            word.clone()
        });
        if let Some(word) = &wanted {
            let context = Context::open()?;
            let is_wanted = |device: &Device| device.is_named(word);
            if !devices::of(&context)?.iter().any(is_wanted) {
                return Err(no_device(word, devices::all(&context)?.iter().find(|d| is_wanted(d))));
            }
        }
        Ok(move |device: &&Device| wanted.as_ref().is_none_or(|word| device.is_named(word)))
    }

    /// Takes all remaining words as pairs.
    fn pairs(&mut self) -> Vec<(&'a str, &'a str)> {
        let (pairs, rest) = self.0.as_chunks();
        self.0 = rest;
        pairs.iter().map(|[name, value]| (name.as_str(), value.as_str())).collect()
    }

    fn end(&self) -> Result<(), Failure> {
        match self.0.first() {
            None => Ok(()),
            Some(word) => Err(format!("unknown parameter {word:?}; see rdma help").into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn options_may_be_joined() {
        for (text, json, pretty, rest) in [
            ("-jp link", true, true, 1),
            ("-j -p dev show", true, true, 2),
            ("link", false, false, 1),
        ] {
            let Ok(Options::Run(style, words)) = options(&strings(text)) else { panic!("{text}") };
            assert_eq!((style.json, style.pretty, words.len()), (json, pretty, rest), "{text}");
        }
        assert!(
            matches!(options(&strings("-V")), Ok(Options::Print(text)) if text.contains("rdma utility"))
        );
        assert!(options(&strings("-x link")).is_err());
    }

    #[test]
    fn words_may_be_abbreviated() {
        let all = strings("li del rxe0");
        let mut words = Words(&all);
        assert_eq!(words.choose(&["dev", "link"]).unwrap(), Some("link"));
        assert_eq!(words.choose(&["add", "delete"]).unwrap(), Some("delete"));
        assert_eq!(words.next("a name").unwrap(), "rxe0");
        assert!(words.end().is_ok() && words.next("more").is_err());
        assert!(Words(&strings("lnk")).choose(&["dev", "link"]).is_err());
        assert!(Words(&[String::new()]).choose(&["dev"]).is_err());
    }

    #[test]
    fn links_of_other_types_are_refused() {
        for (text, part) in [
            ("rxe0", "`type`"),
            ("rxe0 type siw netdev lo", "iWARP device always exists"),
            ("rxe0 type rxe", "`netdev`"),
            ("rxe0 type rxe netdev lo more", "unknown parameter"),
        ] {
            let error = add(&mut Words(&strings(text))).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
