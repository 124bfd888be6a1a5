//! Checks the sources against the tables of permitted imports in `docs/extending.md`.
//!
//! Tests, and code after the first `mod tests` of a file, may import anything.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The file with the tables.
const TABLES: &str = "docs/extending.md";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Returns the rows of the table with this heading. Each cell is a list of its words in backticks.
fn table(heading: &str) -> Vec<Vec<Vec<String>>> {
    let text = read(&root().join(TABLES));
    let mut lines = text.lines().skip_while(|line| *line != heading);
    assert!(lines.next().is_some(), "{TABLES} has no table {heading:?}");
    let words = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect();
    let rows = lines.skip(1).take_while(|line| line.starts_with('|'));
    rows.map(|row| row.trim_matches('|').split('|').map(words).collect()).collect()
}

/// Returns the sources of a part, which is a folder or a file without its extension, keyed by path
/// from the root of the repository. Excludes tests.
fn sources(part: &str) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let file = root().join(format!("{part}.rs"));
    if file.exists() {
        add(&file, &mut found);
    }
    if root().join(part).is_dir() {
        walk(&root().join(part), &mut found);
    }
    found
}

fn walk(dir: &Path, found: &mut BTreeMap<PathBuf, String>) {
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    let files = entries.iter().filter(|path| path.extension().is_some_and(|e| e == "rs"));
    let hidden: BTreeSet<String> = files.flat_map(|path| test_modules(&read(path))).collect();
    for path in entries {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if hidden.contains(&name) {
            continue;
        }
        if path.is_dir() {
            walk(&path, found);
        } else {
            add(&path, found);
        }
    }
}

fn add(path: &Path, found: &mut BTreeMap<PathBuf, String>) {
    if path.extension().is_some_and(|e| e == "rs") {
        let short = path.strip_prefix(root()).unwrap_or(path).to_owned();
        found.insert(short, production(&read(path)));
    }
}

/// Returns the modules in separate files that exist only for tests and loom models.
fn test_modules(text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let of_tests = |attribute: &str| {
        attribute.starts_with("#[cfg(")
            && (attribute.contains("test") || attribute.contains("loom"))
    };
    let module = |pair: &[&str]| {
        let name = pair[1].trim_start_matches("pub(crate) ").strip_prefix("mod ")?;
        (of_tests(pair[0])).then(|| name.strip_suffix(';').map(str::to_owned)).flatten()
    };
    lines.windows(2).filter_map(module).collect()
}

/// Returns the code that is compiled into programs, without comments.
fn production(text: &str) -> String {
    let text = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let code = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    code.collect::<Vec<_>>().join("\n")
}

/// Returns the paths that a source names after `start`, with braces expanded: `a::{b, c::d}` is
/// `a::b` and `a::c::d`.
fn paths(text: &str, start: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (at, _) in text.match_indices(start) {
        let before = text[..at].chars().next_back();
        // A visibility is not an import.
        let is_visibility = text[..at].ends_with("pub(in ");
        if !is_visibility && !before.is_some_and(|c| c.is_ascii_alphanumeric() || "_:".contains(c))
        {
            expand(&text[at + start.len()..], "", &mut found);
        }
    }
    found
}

fn expand(text: &str, prefix: &str, found: &mut BTreeSet<String>) {
    if let Some(inner) = text.strip_prefix('{') {
        let mut depth = 0;
        let mut from = 0;
        for (at, c) in inner.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth > 0 => depth -= 1,
                ',' | '}' if depth == 0 => {
                    expand(inner[from..at].trim(), prefix, found);
                    from = at + 1;
                    if c == '}' {
                        return;
                    }
                }
                _ => {}
            }
        }
        return;
    }
    let end = text.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(text.len());
    let (name, rest) = text.split_at(end);
    let path = if prefix.is_empty() { name.to_owned() } else { format!("{prefix}::{name}") };
    match rest.strip_prefix("::") {
        Some(rest) => expand(rest, &path, found),
        None if !name.is_empty() => drop(found.insert(path)),
        None => {}
    }
}

fn first(path: &str) -> String {
    path.split("::").next().unwrap_or_default().to_owned()
}

/// Returns the folder of the crate that contains a part.
fn crate_of(part: &str) -> &str {
    part.split("/src").next().unwrap_or(part)
}

/// Returns the modules of its own crate that a part imports.
fn imports(part: &str) -> BTreeSet<String> {
    let own = part.rsplit('/').next().unwrap_or_default();
    let mut all = BTreeSet::new();
    for text in sources(part).values() {
        all.extend(paths(text, "crate::").iter().map(|path| first(path)));
    }
    all.remove(own);
    all
}

#[test]
fn parts_import_only_their_table_row() {
    let rows = table("| part | imports of its own crate |");
    let mut wrong = Vec::new();
    let mut parts = BTreeSet::new();
    for row in &rows {
        let allowed: BTreeSet<String> = row[1].iter().cloned().collect();
        for part in &row[0] {
            parts.insert(part.clone());
            assert!(!sources(part).is_empty(), "{part} has no sources");
            let imports = imports(part);
            for path in imports.difference(&allowed) {
                wrong.push(format!("{part} imports {path}, which its row does not name"));
            }
            for path in allowed.difference(&imports) {
                wrong.push(format!("{part} does not import {path}, which its row names"));
            }
        }
    }
    // Every module must have a row.
    for src in ["rnic-abi/src", "rnic-core/src", "rnicd/src"] {
        for path in sources(src).keys() {
            let path = path.strip_prefix(src).unwrap().components().next().unwrap();
            let path = Path::new(path.as_os_str()).with_extension("");
            let part = format!("{src}/{}", path.display());
            let entry = ["lib", "main", "bin"].contains(&path.to_string_lossy().as_ref());
            if !entry && parts.insert(part.clone()) {
                wrong.push(format!("{part} has no row"));
            }
        }
    }
    assert!(wrong.is_empty(), "{TABLES}:\n{}", wrong.join("\n"));
}

#[test]
fn parts_do_not_use_forbidden_modules() {
    let mut wrong = Vec::new();
    for row in table("| part | must not use | except |") {
        for part in &row[0] {
            for (path, text) in sources(part) {
                let excepted = |except: &String| path.starts_with(except);
                for word in row[1].iter().filter(|_| !row[2].iter().any(excepted)) {
                    if names(&text, word) {
                        wrong.push(format!("{} names {word}", path.display()));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{TABLES}:\n{}", wrong.join("\n"));
}

/// Returns true if a source contains a word or a path, directly or with braces.
fn names(text: &str, word: &str) -> bool {
    let part_of_a_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let whole = text.match_indices(word).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = text[at + word.len()..].chars().next();
        !before.is_some_and(part_of_a_name) && !after.is_some_and(part_of_a_name)
    });
    let expanded = word.split_once("::").is_some_and(|(start, rest)| {
        let within = |path: &String| path == rest || path.starts_with(&format!("{rest}::"));
        paths(text, &format!("{start}::")).iter().any(within)
    });
    whole || expanded
}

#[test]
fn no_files_import_each_other_cyclically() {
    for row in table("| folder without cycles |") {
        for folder in &row[0] {
            let cycle = cycle(folder);
            assert!(cycle.is_empty(), "{folder}: {}", cycle.join(" -> "));
        }
    }
}

/// Returns a cycle of files in a folder, or an empty list.
fn cycle(folder: &str) -> Vec<String> {
    let files = sources(folder);
    let src = format!("{}/src", crate_of(folder));
    let modules: BTreeMap<String, String> = files
        .iter()
        .map(|(path, text)| (module_of(path.strip_prefix(&src).unwrap()), text.clone()))
        .collect();
    let arrows: BTreeMap<&String, BTreeSet<String>> =
        modules.iter().map(|(module, text)| (module, targets(module, text, &modules))).collect();
    // A file that imports none of the remaining files is in no cycle.
    let mut left: BTreeSet<&String> = modules.keys().collect();
    loop {
        let free: Vec<&String> = left
            .iter()
            .copied()
            .filter(|module| !arrows[module].iter().any(|to| left.contains(to)))
            .collect();
        if free.is_empty() {
            break;
        }
        left.retain(|module| !free.contains(module));
    }
    let Some(start) = left.first() else { return Vec::new() };
    let mut chain = vec![(*start).clone()];
    loop {
        let next =
            arrows[chain.last().unwrap()].iter().find(|to| left.contains(to)).unwrap().clone();
        let again = chain.iter().position(|module| *module == next);
        chain.push(next);
        if let Some(again) = again {
            return chain.split_off(again);
        }
    }
}

/// Returns `a::b` for `a/b.rs` and `a/b/mod.rs`.
fn module_of(path: &Path) -> String {
    let path = path.with_extension("");
    let names: Vec<_> = path.iter().map(|name| name.to_string_lossy().into_owned()).collect();
    names.into_iter().filter(|name| name != "mod").collect::<Vec<_>>().join("::")
}

/// Returns the modules that define the items imported by a module.
fn targets(module: &str, text: &str, all: &BTreeMap<String, String>) -> BTreeSet<String> {
    // Neither re-exports nor visibilities are imports.
    let text = text.split("pub(in ").map(|part| part.strip_prefix("crate::").unwrap_or(part));
    let text = text.collect::<Vec<_>>().join("pub(in ");
    let without_reexports: String =
        text.split_inclusive(';').filter(|part| reexported(part).is_none()).collect();
    let mut found: Vec<String> = paths(&without_reexports, "crate::").into_iter().collect();
    let own = paths(&without_reexports, "self::");
    found.extend(own.iter().map(|path| format!("{module}::{path}")));
    let mut above = module;
    let mut start = "super::".to_owned();
    while let Some((parent, _)) = above.rsplit_once("::") {
        let named = paths(&without_reexports, &start);
        found.extend(named.iter().map(|path| format!("{parent}::{path}")));
        above = parent;
        start.push_str("super::");
    }
    let children = all.keys().filter_map(|other| other.strip_prefix(&format!("{module}::")));
    for child in children.filter(|child| !child.contains("::")) {
        let named = paths(&without_reexports, &format!("{child}::"));
        found.extend(named.iter().map(|path| format!("{module}::{child}::{path}")));
    }
    let resolved = found.iter().filter_map(|path| resolve(path, all));
    resolved.filter(|to| to != module).collect()
}

/// Returns the module that defines the last name of a path, through re-exports.
fn resolve(path: &str, all: &BTreeMap<String, String>) -> Option<String> {
    if all.contains_key(path) {
        return Some(path.to_owned());
    }
    let (module, name) = path.rsplit_once("::")?;
    let Some(text) = all.get(module) else { return resolve(module, all) };
    for reexported in text.split(';').filter_map(reexported) {
        let mut named = BTreeSet::new();
        expand(reexported, "", &mut named);
        if let Some(from) = named.iter().find(|from| from.rsplit("::").next() == Some(name)) {
            let from = from.strip_prefix("self::").unwrap_or(from);
            return match from.strip_prefix("crate::") {
                Some(from) => resolve(from, all),
                // A macro is defined where it is re-exported.
                None if from == name => Some(module.to_owned()),
                None => resolve(&format!("{module}::{from}"), all),
            };
        }
    }
    Some(module.to_owned())
}

/// Returns the paths of a `pub use` of any visibility.
fn reexported(part: &str) -> Option<&str> {
    let rest = part.trim_start().strip_prefix("pub")?;
    let rest = rest.strip_prefix('(').map_or(Some(rest), |rest| Some(rest.split_once(')')?.1))?;
    rest.trim_start().strip_prefix("use ")
}

#[test]
fn paths_are_expanded_without_comments_and_tests() {
    let text = "use crate::a::{b, c::{self, d}};\nuse crate::e; // crate::f\nlet x = crate::g::h();\n\
                pub(in crate::j) fn k() {}\n\
                #[cfg(test)]\nmod tests {\n    use crate::i;\n}\n";
    let found: Vec<String> = paths(&production(text), "crate::").into_iter().collect();
    assert_eq!(found, ["a::b", "a::c::d", "a::c::self", "e", "g::h"]);
    assert!(
        names(text, "crate::e") && !names(text, "crate::b") && names("a::Foo::now();", "Foo::now")
    );
    assert!(names("use std::{fs, io};", "std::fs") && !names("use std::fsx;", "std::fs"));
    assert_eq!(test_modules("#[cfg(test)]\nmod golden;\nmod real;\n"), ["golden"]);
}
