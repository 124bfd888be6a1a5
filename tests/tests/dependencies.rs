//! Checks the dependencies of the workspace, and of the device plugin in `deploy`, without a
//! network: licences, sources and duplicate versions against `deny.toml` (advisories need `cargo
//! deny`), and the dependencies between its crates against `docs/extending.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").into()
}

fn policy() -> toml::Table {
    std::fs::read_to_string(root().join("deny.toml")).unwrap().parse().unwrap()
}

/// Returns the strings of a list in the policy.
fn texts(policy: &toml::Table, section: &str, key: &str) -> Vec<String> {
    let list = policy[section][key].as_array().expect("a list");
    list.iter().map(|text| text.as_str().expect("a string").to_owned()).collect()
}

/// A crate from outside the workspace.
struct Dependency {
    name: String,
    version: String,
    licence: String,
    source: String,
}

/// Returns the metadata of a workspace as built for Linux, or the error of cargo.
fn metadata_of(folder: &Path) -> Result<Value, String> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--offline", "--locked", "--format-version=1"])
        .arg("--filter-platform=x86_64-unknown-linux-gnu")
        .current_dir(folder)
        .output()
        .unwrap();
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    Ok(serde_json::from_slice(&output.stdout).unwrap())
}

fn metadata() -> Value {
    metadata_of(&root()).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns all external crates of each workspace.
fn all_dependencies() -> Vec<Vec<Dependency>> {
    let mut all = vec![dependencies(&metadata())];
    // Fails where the plugin was never built, because cargo has not fetched its crates.
    match metadata_of(&root().join("deploy/device-plugin")) {
        Ok(metadata) => all.push(dependencies(&metadata)),
        Err(error) => rnic_tests::omit(&format!("the device plugin was not built here: {error}")),
    }
    all
}

/// Returns all external crates, including dev-dependencies and optional features.
fn dependencies(metadata: &Value) -> Vec<Dependency> {
    let text = |package: &Value, key: &str| package[key].as_str().unwrap_or_default().to_owned();
    let packages = metadata["packages"].as_array().expect("packages");
    let foreign = packages.iter().filter(|package| !package["source"].is_null());
    let dependency = |package: &Value| Dependency {
        name: text(package, "name"),
        version: text(package, "version"),
        licence: text(package, "license"),
        source: text(package, "source"),
    };
    foreign.map(dependency).collect()
}

/// Returns true if the allowed licences satisfy an SPDX expression. `/` is an old form of `OR`. An
/// exception (`WITH`) belongs to the licence before it and only adds permissions.
fn is_met(expression: &str, allowed: &[String]) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let mut words = spaced.split_whitespace().peekable();
    any(&mut words, allowed)
}

type Words<'w> = std::iter::Peekable<std::str::SplitWhitespace<'w>>;

fn any(words: &mut Words<'_>, allowed: &[String]) -> bool {
    let mut met = all(words, allowed);
    while words.next_if_eq(&"OR").is_some() {
        met |= all(words, allowed);
    }
    met
}

fn all(words: &mut Words<'_>, allowed: &[String]) -> bool {
    let mut met = one(words, allowed);
    while words.next_if_eq(&"AND").is_some() {
        met &= one(words, allowed);
    }
    met
}

fn one(words: &mut Words<'_>, allowed: &[String]) -> bool {
    if words.next_if_eq(&"(").is_some() {
        let met = any(words, allowed);
        assert_eq!(words.next(), Some(")"), "an unclosed expression");
        return met;
    }
    let licence = words.next().unwrap_or_default();
    if words.next_if_eq(&"WITH").is_some() {
        words.next();
    }
    allowed.iter().any(|a| a == licence)
}

/// Returns the crates that each crate depends on directly when it is built, by ID.
fn links(metadata: &Value) -> BTreeMap<String, BTreeSet<String>> {
    let text = |value: &Value| value.as_str().expect("a string").to_owned();
    let list = |value: &Value| value.as_array().expect("a list").clone();
    let is_normal = |dependency: &&Value| {
        list(&dependency["dep_kinds"]).iter().any(|kind| kind["kind"].is_null())
    };
    let of = |node: &Value| {
        let dependencies = list(&node["deps"]);
        let normal = dependencies.iter().filter(is_normal).map(|d| text(&d["pkg"])).collect();
        (text(&node["id"]), normal)
    };
    list(&metadata["resolve"]["nodes"]).iter().map(of).collect()
}

/// Returns the names of the workspace's crates by ID.
fn members(metadata: &Value) -> BTreeMap<String, String> {
    let packages = metadata["packages"].as_array().expect("packages");
    let own = packages.iter().filter(|package| package["source"].is_null());
    let text = |value: &Value| value.as_str().expect("a string").to_owned();
    own.map(|package| (text(&package["id"]), text(&package["name"]))).collect()
}

#[test]
fn crates_have_metadata_for_a_registry() {
    // Tests, measurements and tools of the repository stay in it.
    let own = ["rnic-bench", "rnic-tests", "xtask"];
    for package in metadata()["packages"].as_array().unwrap() {
        let name = package["name"].as_str().unwrap();
        if !package["source"].is_null() || own.contains(&name) {
            continue;
        }
        for key in ["description", "readme", "keywords", "categories"] {
            let value = &package[key];
            assert!(
                !value.is_null() && value.as_array().is_none_or(|list| !list.is_empty()),
                "{name}: {key}"
            );
        }
        assert!(package["metadata"]["docs"]["rs"]["targets"].is_array(), "{name}: docs.rs");
        assert_eq!(package["publish"], Value::Array(Vec::new()), "{name} has no licence yet");
    }
}

#[test]
fn crates_depend_on_each_other_as_documented() {
    let metadata = metadata();
    let links = links(&metadata);
    let members = members(&metadata);
    let page = std::fs::read_to_string(root().join("docs/extending.md")).unwrap();
    let table = page.lines().skip_while(|line| *line != "| crate | contains | depends on |");
    let rows: BTreeMap<&str, BTreeSet<&str>> = table
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .map(|line| {
            let cells: Vec<&str> = line.split('|').collect();
            (cells[1].trim_matches([' ', '`']), cells[3].split('`').skip(1).step_by(2).collect())
        })
        .collect();
    for (id, name) in members.iter().filter(|(_, name)| *name != "rnic-tests") {
        let used = links[id].iter().filter_map(|id| members.get(id)).map(String::as_str);
        assert_eq!(rows.get(name.as_str()), Some(&used.collect()), "{name}");
    }
}

#[test]
fn daemon_and_client_link_only_what_they_need() {
    let metadata = metadata();
    let links = links(&metadata);
    let members = members(&metadata);
    let linked = |name: &str| {
        let of = |(id, other): (&String, &String)| (other == name).then(|| id.clone());
        let mut left: Vec<String> = members.iter().filter_map(of).collect();
        let mut found = BTreeSet::new();
        while let Some(id) = left.pop() {
            if found.insert(id.clone()) {
                left.extend(links[&id].iter().cloned());
            }
        }
        assert!(found.len() > 10, "{name}: {found:?}");
        found
    };
    for (name, others) in [
        (
            "rnic-daemon",
            &["clap", "plotters", "hdrhistogram", "indicatif", "sha2", "rnic-client"][..],
        ),
        ("rnic-client", &["rnic-core", "slab", "chacha20", "crc32c"][..]),
        ("rnic-verbs", &["rnic-core", "chacha20", "crc32c"][..]),
        ("rnic-tools", &["rnic-core", "plotters", "crc32c"][..]),
    ] {
        let linked = linked(name);
        for other in others {
            let is_other = |id: &&String| {
                id.contains(&format!("#{other}@")) || id.contains(&format!("/{other}#"))
            };
            assert_eq!(linked.iter().find(is_other), None, "{name} links {other}");
        }
    }
}

#[test]
fn every_dependency_has_an_allowed_licence() {
    let allowed = texts(&policy(), "licenses", "allow");
    let all = all_dependencies();
    assert!(all.iter().all(|dependencies| dependencies.len() > 50));
    let refused: Vec<_> = all
        .iter()
        .flatten()
        .filter(|d| !is_met(&d.licence, &allowed))
        .map(|d| format!("{} {}: {:?}", d.name, d.version, d.licence))
        .collect();
    assert!(refused.is_empty(), "{}", refused.join("\n"));
}

#[test]
fn every_dependency_is_from_one_registry() {
    let policy = policy();
    for key in ["unknown-registry", "unknown-git"] {
        assert_eq!(policy["sources"][key].as_str(), Some("deny"), "{key}");
    }
    let sources: BTreeSet<String> =
        all_dependencies().into_iter().flatten().map(|d| d.source).collect();
    assert_eq!(sources.len(), 1, "{sources:?}");
    assert!(sources.iter().all(|source| source.starts_with("registry+")), "{sources:?}");
}

#[test]
fn duplicate_versions_need_a_reason() {
    let policy = policy();
    let skipped = policy["bans"]["skip"].as_array().expect("a list");
    let skipped: BTreeMap<&str, &str> = skipped
        .iter()
        .map(|skip| (skip["crate"].as_str().unwrap(), skip["reason"].as_str().unwrap()))
        .collect();
    assert!(skipped.values().all(|reason| !reason.is_empty()), "{skipped:?}");
    let mut versions: BTreeMap<(usize, String), BTreeSet<String>> = BTreeMap::new();
    for (workspace, dependencies) in all_dependencies().into_iter().enumerate() {
        for d in dependencies {
            versions.entry((workspace, d.name)).or_default().insert(d.version);
        }
    }
    let mut used = BTreeSet::new();
    let mut twice = Vec::new();
    for ((_, name), mut versions) in versions {
        // `name:1.2` in the policy covers all versions that start with 1.2.
        versions.retain(|version| {
            let skip = skipped.keys().copied().find(|skip| {
                skip.split_once(':').is_some_and(|(n, v)| {
                    n == name && (version == v || version.starts_with(&format!("{v}.")))
                })
            });
            used.extend(skip);
            skip.is_none()
        });
        if versions.len() > 1 {
            twice.push(format!("{name}: {versions:?}"));
        }
    }
    assert!(twice.is_empty(), "{}", twice.join("\n"));
    let unused: Vec<_> = skipped.keys().filter(|skip| !used.contains(*skip)).collect();
    assert!(unused.is_empty(), "skipped, but no longer present: {unused:?}");
}

#[test]
fn licence_expressions_are_parsed() {
    let allowed: Vec<String> = ["MIT", "Apache-2.0"].map(str::to_owned).into();
    for met in [
        "MIT",
        "MIT/Apache-2.0",
        "GPL-3.0 OR MIT",
        "Apache-2.0 WITH LLVM-exception",
        "(GPL-3.0 OR MIT) AND Apache-2.0",
    ] {
        assert!(is_met(met, &allowed), "{met}");
    }
    for unmet in ["", "GPL-3.0", "MIT AND GPL-3.0", "(MIT OR Apache-2.0) AND Unicode-3.0"] {
        assert!(!is_met(unmet, &allowed), "{unmet}");
    }
}
