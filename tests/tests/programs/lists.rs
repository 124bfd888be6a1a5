//! `rnicctl`: every list as text and as JSON, for a session with one object of each type.

use std::process::Command;

use rnic_client::{SrqOptions, WindowKind};
use rnic_tests::{Client, Daemon, built};

const RNICCTL: &str = "rnicctl";

/// Each list, the minimum number of its rows for this session, and a key of its rows.
const LISTS: [(&str, usize, &str); 11] = [
    ("clients", 1, "session"),
    ("qps", 1, "qp"),
    ("cqs", 1, "cq"),
    ("mrs", 1, "mr"),
    ("srqs", 1, "srq"),
    ("windows", 1, "window"),
    ("pds", 1, "pd"),
    ("listeners", 1, "listener"),
    ("limits", 1, "key"),
    ("events", 1, "sequence"),
    ("why", 1, "id"),
];

fn rnicctl(daemon: &Daemon, arguments: &[&str]) -> String {
    let mut command = Command::new(built::program(RNICCTL));
    let output = command.args(arguments).arg("--socket").arg(daemon.socket()).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn rnicctl_shows_every_kind_of_object() {
    let daemon = Daemon::start("");
    let client = Client::new(&daemon);
    let srq = client.pd.create_srq(&SrqOptions::default()).unwrap();
    let window = client.pd.alloc_window(WindowKind::Type1).unwrap();
    let qp = client.qp();
    let region = client.region(4096, rnic_client::Access::empty());
    let listener = client.listener();
    // A refused request leaves a diagnosis.
    client.context.create_cq(u32::MAX, None).unwrap_err();
    for (list, least, key) in LISTS {
        let json: serde_json::Value =
            serde_json::from_str(&rnicctl(&daemon, &[list, "--json"])).unwrap();
        let rows = json.as_array().unwrap();
        assert!(rows.len() >= least, "{list}: {json}");
        assert!(rows.iter().all(|row| row.get(key).is_some()), "{list} without {key}: {json}");
        let text = rnicctl(&daemon, &[list]);
        assert!(text.lines().count() > rows.len().min(1), "{list}: {text}");
    }
    drop((srq, window, qp, region, listener));
}
