//! The list of the crates in a release (CycloneDX 1.5), from `cargo metadata`.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::Failure;

/// Packages whose programs and libraries are released.
const RELEASED: [&str; 6] =
    ["rnicd", "rnic-tools", "rnic-run", "rnic-verbs", "rnic-verbs-rdmacm", "rnic-verbs-preload"];

/// Returns the list for a target as JSON.
pub fn list(target: &str) -> Result<String, Failure> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let failed = Failure::at(Path::new("cargo metadata"));
    let output = Command::new(cargo)
        .args(["metadata", "--format-version=1", "--locked", "--filter-platform", target])
        .output()
        .map_err(&failed)?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        return Err(failed(io::Error::other(text.trim().to_owned())));
    }
    let metadata: Value =
        serde_json::from_slice(&output.stdout).map_err(|error| failed(error.into()))?;
    let linked = linked(&metadata);
    let mut components: Vec<Value> = array(&metadata["packages"])
        .filter(|package| linked.contains(text(&package["id"])))
        .map(component)
        .collect();
    components.sort_by_key(|component| text(&component["bom-ref"]).to_owned());
    let list = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "component": {
            "type": "application", "name": "rnicd", "version": env!("CARGO_PKG_VERSION"),
        } },
        "components": components,
    });
    Ok(format!("{list:#}\n"))
}

fn component(package: &Value) -> Value {
    let (name, version) = (text(&package["name"]), text(&package["version"]));
    let url = format!("pkg:cargo/{name}@{version}");
    let mut component = json!({
        "type": "library", "bom-ref": url, "name": name, "version": version, "purl": url,
    });
    if let Some(licence) = package["license"].as_str() {
        // Older crates write "/" for "OR".
        let expression = licence.replace('/', " OR ");
        component["licenses"] = json!([{ "expression": expression }]);
    }
    component
}

/// Returns the IDs of the released packages and of all that they link, directly or not.
fn linked(metadata: &Value) -> BTreeSet<&str> {
    let released = array(&metadata["packages"]).filter(|package| {
        package["source"].is_null() && RELEASED.contains(&text(&package["name"]))
    });
    let mut waiting: Vec<&str> = released.map(|package| text(&package["id"])).collect();
    let mut linked = BTreeSet::new();
    while let Some(id) = waiting.pop() {
        if !linked.insert(id) {
            continue;
        }
        let nodes = array(&metadata["resolve"]["nodes"]).filter(|node| text(&node["id"]) == id);
        let dependencies = nodes.flat_map(|node| array(&node["deps"]));
        // Dependencies of tests and build scripts are not part of the release.
        let is_linked = |dependency: &&Value| {
            array(&dependency["dep_kinds"]).any(|kind| kind["kind"].is_null())
        };
        waiting.extend(dependencies.filter(is_linked).map(|dependency| text(&dependency["pkg"])));
    }
    linked
}

fn array(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
