//! Installs rnicd, or replaces an earlier installation.

use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path};

use super::change::{self, Changes};
use super::manifest::{Item, MANIFEST, Manifest};
use super::parts::{self, Content, Source};
use super::plan::{self, Action, Step};
use super::report::{self, LEFT, Report};
use super::root::Root;
use super::uninstall::{refresh_loader, stale};
use super::{Allow, Install, SystemError, accounts, loader, mount, service, writable};

/// Installs rnicd. If a step fails, all earlier ones are undone.
pub fn install(args: &Install) -> Result<Report, SystemError> {
    let root = if args.dry_run { Root::open(&args.at.root)? } else { writable(&args.at)? };
    check(args, &root)?;
    let _lock = if args.dry_run { None } else { Some(root.lock()?) };
    let old = Manifest::read(&root)?;
    let parts = parts::of(args, &root, &Source::of_this_program()?)?;
    let steps = plan::decide(parts, &root, old.as_ref())?;
    if root.is_own() {
        check_owners(&args.prefix, &root, &steps)?;
    }
    let mut items: Vec<Item> = steps.iter().filter_map(|step| step.item.clone()).collect();
    items.extend((args.mount && root.is_own()).then(mount::item));
    let stale = stale(&root, old.as_ref(), &items)?;
    if args.dry_run {
        return Ok(dry_run(args, &root, &steps, &stale));
    }
    let new = Manifest {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        prefix: args.prefix.clone(),
        complete: false,
        items: items.iter().chain(&stale).cloned().collect(),
    };
    let mut installation = Installation { root: &root, args, old, changes: Changes::default() };
    if let Err(error) = installation.carry_out(&steps, &new) {
        return Err(installation.undo(&steps, error));
    }
    let Installation { changes, .. } = installation;
    changes.keep();
    let left = change::remove_all(&root, &stale)?;
    items.iter_mut().for_each(forget_earlier);
    Manifest { complete: true, items, ..new.clone() }.write(&root)?;
    Ok(done(args, &root, &steps, &new, left))
}

/// After a replacement, only the new content is known.
fn forget_earlier(item: &mut Item) {
    if let super::manifest::ItemKind::File { sha256 } = &mut item.kind {
        sha256.truncate(1);
    }
}

/// Checks the options.
fn check(args: &Install, root: &Root) -> Result<(), SystemError> {
    let invalid = |why| SystemError::Prefix { path: args.prefix.clone(), why };
    let is_plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
    if !args.prefix.is_absolute() || !args.prefix.components().all(is_plain) {
        return Err(invalid("must be an absolute path without `..`"));
    }
    // Separators of ld.so.conf, ld.so.preload and systemd's units.
    let is_separator = |byte: &u8| byte.is_ascii_whitespace() || b":,;#%\"'\\$".contains(byte);
    let text = args.prefix.to_str();
    if text.is_none_or(|text| text.bytes().any(|byte| is_separator(&byte))) {
        return Err(invalid("must not contain blanks, colons, quotes and the like"));
    }
    if let Allow::Group(group) = &args.allow
        && group != super::OWN_NAME
        && !accounts::has_group(root, group)?
    {
        let path = root.at(Path::new(accounts::GROUPS))?;
        return Err(SystemError::NoGroup { group: group.clone(), path });
    }
    Ok(())
}

/// Checks that only root can replace the programs and libraries, which root's programs will load.
fn check_owners(prefix: &Path, root: &Root, steps: &[Step]) -> Result<(), SystemError> {
    let prefix_place = root.real(prefix)?;
    let below = steps.iter().filter(|step| step.part.path.starts_with(prefix));
    for place in prefix_place.ancestors().chain(below.map(|step| &*step.place)) {
        let Ok(found) = std::fs::metadata(place) else { continue };
        let is_of_all = found.mode() & WORLD_WRITABLE != 0 && found.mode() & STICKY == 0;
        if found.uid() != 0 || is_of_all {
            return Err(SystemError::NotOfRoot { path: place.to_owned() });
        }
    }
    Ok(())
}

/// `S_IWOTH`.
const WORLD_WRITABLE: u32 = 0o002;
/// `S_ISVTX`: only the owner of a file can replace it.
const STICKY: u32 = 0o1000;

/// An installation that has not succeeded yet.
struct Installation<'a> {
    root: &'a Root,
    args: &'a Install,
    old: Option<Manifest>,
    changes: Changes,
}

impl Installation<'_> {
    fn carry_out(&mut self, steps: &[Step], new: &Manifest) -> Result<(), SystemError> {
        let (above, others): (Vec<&Step>, Vec<&Step>) = steps.iter().partition(is_above_manifest);
        for step in above {
            self.changes.make(step)?;
        }
        // Before anything else is changed, so that `uninstall` works if this process is killed.
        new.write(self.root)?;
        if self.old.is_some() {
            service::stop(self.root)?;
            if self.root.is_own() {
                mount::hide()?;
            }
        }
        for step in others {
            self.changes.make(step)?;
        }
        if loader::can_update(self.root) {
            loader::update(self.root)?;
            loader::check(self.root, &self.args.prefix)?;
        }
        if !self.args.no_start && service::start(self.root, new)?.is_some() {
            mount::show(new)?;
        }
        Ok(())
    }

    /// Undoes all steps. Returns the error, and the steps that could not be undone.
    fn undo(self, steps: &[Step], error: SystemError) -> SystemError {
        let Installation { root, old, changes, .. } = self;
        let mut left = Vec::new();
        let mut undone = |result: Result<(), SystemError>| {
            left.extend(result.err().map(|error| error.to_string()));
        };
        undone(service::stop(root));
        if root.is_own() {
            undone(mount::hide());
        }
        let manifest = match &old {
            Some(old) => old.write(root),
            None => root.at(Path::new(MANIFEST)).map(|path| drop(std::fs::remove_file(path))),
        };
        undone(manifest);
        let failed = changes.undo();
        let items: Vec<Item> = steps.iter().filter_map(|step| step.item.clone()).collect();
        undone(refresh_loader(root, &items));
        undone(service::reload(root));
        if let Some(old) = &old {
            let started = service::start(root, old).map(drop);
            undone(started.and_then(|()| mount::show(old)));
        }
        left.extend(failed);
        if left.is_empty() {
            error
        } else {
            SystemError::NotUndone { error: Box::new(error), left }
        }
    }
}

fn is_above_manifest(step: &&Step) -> bool {
    Path::new(MANIFEST).starts_with(&step.part.path)
}

/// Describes the changes without making them.
fn dry_run(args: &Install, root: &Root, steps: &[Step], stale: &[Item]) -> Report {
    let mut report = Report::default();
    for Step { part, action, .. } in steps {
        let path = part.path.display();
        let name = match action {
            Action::Nothing => continue,
            Action::Create => "create",
            Action::Replace => "replace",
            Action::Keep => "keep",
        };
        match &part.content {
            Content::Folder => report.add(name, format!("{path}/")),
            Content::Copy { from, .. } => {
                report.add(name, format!("{path} from {}", from.display()))
            }
            Content::Link { to } => report.add(name, format!("{path} -> {}", to.display())),
            Content::Line { line, .. } => report.add(name, format!("{path}: line {line}")),
            Content::Text(_) => report.add(name, path.to_string()),
            Content::Output => {}
        }
    }
    for item in stale {
        report.add("remove", item.path.display().to_string());
    }
    if loader::can_update(root) {
        report.add("run", "ldconfig");
    }
    if root.is_own() && !args.no_start {
        report.add(
            "start",
            format!("{} as user {}", args.prefix.join("bin/rnicd").display(), super::OWN_NAME),
        );
        if args.mount {
            report.add("mount", "over /sys/class");
        }
    }
    report
}

/// Describes the completed installation.
fn done(args: &Install, root: &Root, steps: &[Step], new: &Manifest, left: Vec<String>) -> Report {
    let mut report = Report::default();
    report.add("installed", format!("rnicd {} in {}", new.version, new.prefix.display()));
    for step in steps.iter().filter(|step| step.action == Action::Keep) {
        report.add("kept", step.part.path.display().to_string());
    }
    if root.is_own() && !args.no_start {
        report::daemon(&mut report);
    }
    report::commands(&mut report, &args.prefix, new);
    if !loader::can_update(root) {
        report.add("next", "run ldconfig in the root");
    }
    for left in left {
        report.add(LEFT, left);
    }
    report
}
