//! Generates docs/symbols.md, the functions of the C libraries and the programs that use them, and
//! checks it against the sources.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use rnic_client::faults::Verb;

const LIBIBVERBS: &str = include_str!("../../rnic-verbs/golden/libibverbs.txt");
const LIBRDMACM: &str = include_str!("../../rnic-verbs/golden/librdmacm.txt");

const INTRODUCTION: &str = "\
# Symbols of the C libraries

Each function that a program can call, where it is defined in `rnic-verbs/src`, or how it fails, the
`verb` of the [fault rules](faults.md#verbs) that fail it, and the Debian 12 packages of
[programs.md](programs.md) whose programs or libraries import it. A function without a verb returns
no error, or always fails. A function that fails logs its name if `RNIC_LOG` is `debug`. Functions
for provider drivers (`IBVERBS_PRIVATE`) are omitted: `ibv_query_gid_type` works, the others fail or
do nothing.

A test checks the columns but the last. `RNIC_WRITE_DOCS=1` rewrites the page, with the packages
that are installed.
";

const OPERATIONS: &str = "
## Operations

Inline functions of the C headers call these through a device context, a CQ or a QP
(`rnic-verbs/src/verbs/ops.rs`). The other operations of a context fail with `EOPNOTSUPP`. Those of
a CQ or a QP are null pointers: `ibv_create_cq_ex` and `ibv_create_qp_ex` refuse the flags that
select them.

| operation | here | verb |
| --- | --- | --- |
";

/// Debian packages with programs or libraries that are linked to the C libraries.
const PACKAGES: [&str; 9] = [
    "fio",
    "ibverbs-utils",
    "infiniband-diags",
    "libfabric1",
    "libucx0",
    "netpipe-openmpi",
    "perftest",
    "python3-pyverbs",
    "rdmacm-utils",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns the sources of the drop-in, keyed by path from its folder `src`.
fn sources() -> BTreeMap<String, String> {
    let src = root().join("rnic-verbs/src");
    let mut folders = vec![src.clone()];
    let mut found = BTreeMap::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(&src).unwrap().to_string_lossy().into_owned();
                found.insert(name, std::fs::read_to_string(path).unwrap());
            }
        }
    }
    found
}

/// Returns where each function is defined, or how it fails.
fn definitions(sources: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for (file, text) in sources.iter().filter(|(file, _)| *file != ABSENT) {
        for line in text.lines().map(str::trim_start) {
            let after = ["plain ", "uncancelled ", "cancellable "]
                .iter()
                .find_map(|kind| line.strip_prefix(kind))
                .or_else(|| Some(line.split_once("extern \"C\" fn ")?.1));
            let name = after.and_then(|rest| rest.split_once('(')).map(|(name, _)| name);
            if let Some(name) = name.filter(|name| name.chars().all(|c| c != ' ')) {
                found.insert(name.to_owned(), format!("`{file}`"));
            }
        }
    }
    for block in sources[ABSENT].split("\nabsent! {").skip(1) {
        let block = block.split('}').next().unwrap_or_default();
        for list in block.split(';').filter_map(|list| list.split_once(':')) {
            let how = match list.0.trim() {
                "pointer" => "fails: null, `EOPNOTSUPP`",
                "number" => "fails: returns `EOPNOTSUPP`",
                "minus_one" => "fails: -1, `EOPNOTSUPP`",
                "nothing" => "does nothing",
                other => panic!("{other} in {ABSENT}"),
            };
            for name in list.1.split(',') {
                found.insert(name.trim().to_owned(), how.to_owned());
            }
        }
    }
    found
}

const ABSENT: &str = "ffi/absent.rs";
const OPS: &str = "verbs/ops.rs";

/// Functions whose verb in fault rules is not their name.
const VERBS: [(&str, &str); 20] = [
    ("ibv_create_ah_from_wc", "create_ah"),
    ("ibv_query_gid_ex", "query_gid"),
    ("ibv_query_device_ex", "query_device"),
    ("ibv_query_rt_values", "query_rt_values_ex"),
    ("ibv_reg_buf_mr", "reg_mr"),
    ("ibv_reg_mr_ex", "reg_mr"),
    ("ibv_reg_mr_iova", "reg_mr"),
    ("ibv_reg_mr_iova2", "reg_mr"),
    ("ibv_create_cq_ex", "create_cq"),
    ("ibv_create_qp_ex", "create_qp"),
    ("ibv_create_srq_ex", "create_srq"),
    ("ibv_bind_mw", "post_send"),
    ("ibv_wr_complete", "post_send"),
    ("ibv_start_poll", "poll_cq"),
    ("ibv_next_poll", "poll_cq"),
    ("rdma_create_qp_ex", "rdma_create_qp"),
    ("rdma_create_srq_ex", "rdma_create_srq"),
    // Fail without a rule.
    ("ibv_advise_mr", ""),
    ("ibv_export_buf_dmabuf_fd", ""),
    // Runs before the program has a session.
    ("ibv_fork_init", ""),
];

/// Functions that return no error: those without a result, those that return a value of a structure
/// or a table, and those that build a request, for which `ibv_wr_complete` returns the error.
const INFALLIBLE: [&str; 57] = [
    "ibv_ack_async_event",
    "ibv_ack_cq_events",
    "ibv_dofork_range",
    "ibv_dontfork_range",
    "ibv_end_poll",
    "ibv_event_type_str",
    "ibv_free_buf",
    "ibv_free_device_list",
    "ibv_get_device_guid",
    "ibv_get_device_name",
    "ibv_get_sysfs_path",
    "ibv_is_fork_initialized",
    "ibv_node_type_str",
    "ibv_port_state_str",
    "ibv_qp_to_qp_ex",
    "ibv_query_qp_data_in_order",
    "ibv_rate_to_mbps",
    "ibv_rate_to_mult",
    "ibv_wc_read_byte_len",
    "ibv_wc_read_dlid_path_bits",
    "ibv_wc_read_imm_data",
    "ibv_wc_read_opcode",
    "ibv_wc_read_qp_num",
    "ibv_wc_read_sl",
    "ibv_wc_read_slid",
    "ibv_wc_read_src_qp",
    "ibv_wc_read_vendor_err",
    "ibv_wc_read_wc_flags",
    "ibv_wc_status_str",
    "ibv_wr_abort",
    "ibv_wr_atomic_cmp_swp",
    "ibv_wr_atomic_fetch_add",
    "ibv_wr_bind_mw",
    "ibv_wr_local_inv",
    "ibv_wr_rdma_read",
    "ibv_wr_rdma_write",
    "ibv_wr_rdma_write_imm",
    "ibv_wr_send",
    "ibv_wr_send_imm",
    "ibv_wr_send_inv",
    "ibv_wr_set_inline_data",
    "ibv_wr_set_inline_data_list",
    "ibv_wr_set_sge",
    "ibv_wr_set_sge_list",
    "ibv_wr_set_ud_addr",
    "ibv_wr_start",
    "mbps_to_ibv_rate",
    "mult_to_ibv_rate",
    "rdma_destroy_ep",
    "rdma_destroy_event_channel",
    "rdma_destroy_qp",
    "rdma_destroy_srq",
    "rdma_event_str",
    "rdma_free_devices",
    "rdma_freeaddrinfo",
    "rdma_get_dst_port",
    "rdma_get_src_port",
];

/// Returns the verb of the fault rules that fail a function; empty if none does.
///
/// # Panics
///
/// If the function is in neither list, and its name is no verb.
fn verb(function: &str, here: &str) -> &'static str {
    if !here.starts_with('`') || INFALLIBLE.contains(&function) {
        return "";
    }
    let function = function.strip_prefix('_').unwrap_or(function);
    if let Some((_, verb)) = VERBS.iter().find(|(name, _)| *name == function) {
        return verb;
    }
    let name = function.strip_prefix("ibv_").unwrap_or(function);
    let found = Verb::names().find(|verb| *verb == name);
    found.unwrap_or_else(|| panic!("no fault rule can fail {function}"))
}

/// Returns the verb in a cell of a table.
fn verb_cell(function: &str, here: &str) -> String {
    let verb = verb(function, here);
    if verb.is_empty() { String::new() } else { format!("`{verb}`") }
}

/// Returns the operations and where they are defined.
fn operations(
    sources: &BTreeMap<String, String>,
    definitions: &BTreeMap<String, String>,
) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut table = "";
    for line in sources[OPS].lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("fn ") {
            table = name.split('(').next().unwrap_or_default();
        }
        let Some((slot, function)) = line.strip_suffix(',').and_then(|line| line.split_once(": "))
        else {
            continue;
        };
        let slot = slot.split(' ').next().unwrap_or_default();
        let Some(here) = definitions.get(function).filter(|_| !function.contains("::")) else {
            continue;
        };
        let inline = match table {
            "cq" if slot.starts_with("read_") => format!("ibv_wc_{slot}"),
            _ => format!("ibv_{slot}"),
        };
        found.push((inline, here.clone()));
    }
    found
}

/// Returns the packages that import each symbol, as far as they are installed.
fn imports() -> BTreeMap<String, BTreeSet<&'static str>> {
    let mut found: BTreeMap<String, BTreeSet<&'static str>> = BTreeMap::new();
    for package in PACKAGES {
        let listed = Command::new("dpkg").args(["-L", package]).output();
        let listed = listed.map(|output| output.stdout).unwrap_or_default();
        let listed = String::from_utf8_lossy(&listed).into_owned();
        let is_binary = |file: &&str| {
            (file.contains("/bin/") || file.contains(".so")) && Path::new(file).is_file()
        };
        for file in listed.lines().filter(is_binary) {
            let listing = Command::new("nm").args(["-D", "--undefined-only", file]).output();
            let listing = listing.expect("binutils come with the linker").stdout;
            for line in String::from_utf8_lossy(&listing).lines() {
                let symbol = line.split_whitespace().nth(1).unwrap_or_default();
                let name = symbol.split('@').next().unwrap_or_default();
                found.entry(name.to_owned()).or_default().insert(package);
            }
        }
    }
    found
}

/// Returns the page, with the packages that import each symbol.
fn page(imports: &BTreeMap<String, BTreeSet<&'static str>>) -> String {
    let sources = sources();
    let definitions = definitions(&sources);
    let mut text = INTRODUCTION.to_owned();
    let head = "| symbol | here | verb | used by |\n| --- | --- | --- | --- |";
    for (library, golden) in [("libibverbs.so.1", LIBIBVERBS), ("librdmacm.so.1", LIBRDMACM)] {
        writeln!(text, "\n## {library}\n\n{head}").unwrap();
        for name in golden.lines().filter_map(published) {
            if golden.lines().any(|line| is_private(line, name)) {
                continue;
            }
            let here = definitions.get(name).unwrap_or_else(|| panic!("{name} is not defined"));
            let users = imports
                .get(name)
                .map(|packages| packages.iter().copied().collect::<Vec<_>>().join(", "));
            let verb = verb_cell(name, here);
            writeln!(text, "| `{name}` | {here} | {verb} | {} |", users.unwrap_or_default())
                .unwrap();
        }
    }
    text.push_str(OPERATIONS);
    let operations = operations(&sources, &definitions);
    assert!(operations.len() > 40, "{operations:?}");
    for (name, here) in operations {
        let verb = verb_cell(&name, &here);
        writeln!(text, "| `{name}` | {here} | {verb} |").unwrap();
    }
    text
}

/// Returns the name in a line of a list, unless the line is for an older version of the function.
fn published(line: &str) -> Option<&str> {
    // Functions of rsockets have one version, which is not the default.
    let split = line.split_once("@@").or_else(|| line.split_once("@RDMACM"));
    split.map(|(name, _)| name)
}

/// Returns true if a line publishes a name for drivers or for librdmacm.so.1.
fn is_private(line: &str, name: &str) -> bool {
    let node = line.strip_prefix(name).and_then(|rest| rest.strip_prefix("@@"));
    node.is_some_and(|node| node.starts_with("IBVERBS_PRIVATE") || node.starts_with("RNIC"))
}

/// Removes the column of packages, which depends on the machine.
fn without_packages(page: &str) -> Vec<String> {
    let cells = |line: &str| line.split(" | ").take(3).collect::<Vec<_>>().join(" | ");
    page.lines()
        .map(|line| if line.starts_with("| `") { cells(line) } else { line.to_owned() })
        .collect()
}

#[test]
fn symbols_page_is_current() {
    let file = root().join("docs/symbols.md");
    if std::env::var_os("RNIC_WRITE_DOCS").is_some() {
        std::fs::write(&file, page(&imports())).expect("writable sources");
    }
    let found = std::fs::read_to_string(&file).unwrap_or_default();
    let current = page(&BTreeMap::new());
    assert!(
        without_packages(&found) == without_packages(&current),
        "docs/symbols.md is stale: run this with RNIC_WRITE_DOCS=1"
    );
}

/// A list that names a function which has left the libraries, or a verb that rules do not know, is
/// out of date.
#[test]
fn lists_of_functions_are_current() {
    let defined = definitions(&sources());
    let operations = operations(&sources(), &defined);
    let is_defined = |name: &str| {
        [LIBIBVERBS, LIBRDMACM].iter().any(|golden| golden.contains(&format!("{name}@@")))
            || operations.iter().any(|(operation, _)| operation == name)
    };
    for name in INFALLIBLE.iter().chain(VERBS.iter().map(|(name, _)| name)) {
        assert!(is_defined(name), "{name}");
    }
    for (_, verb) in VERBS.iter().filter(|(_, verb)| !verb.is_empty()) {
        assert!(Verb::names().any(|name| name == *verb), "{verb}");
    }
}

#[test]
fn installed_programs_find_all_their_symbols() {
    let imports = imports();
    let exported = |name: &str| {
        [LIBIBVERBS, LIBRDMACM].iter().any(|golden| golden.contains(&format!("{name}@@")))
    };
    let of_verbs = |name: &&String| name.starts_with("ibv_") || name.starts_with("rdma_");
    let missing: Vec<_> = imports.keys().filter(of_verbs).filter(|name| !exported(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
