//! `rnic-perf` between two hosts: two daemons with ends that use TCP.

use rnic_tests::Daemon;

use super::{PERF, end, start};

#[test]
fn two_hosts_measure_each_operation() {
    let serving = Daemon::start("");
    let driving = Daemon::start("");
    let mut server = start(&serving, PERF, &["serve", "127.0.0.1:0"]);
    let address = server.line_after("listening on ");
    // In sequence: the server must be ready again for each.
    for what in
        ["bw --op write,send --size 64KiB --working-set 1MiB", "lat --event", "rate --qps 2"]
    {
        let mut arguments: Vec<&str> = what.split(' ').collect();
        arguments.extend(["--to", &address, "--iters", "64", "--rounds", "1", "--json"]);
        let (code, said) = end(start(&driving, PERF, &arguments));
        assert_eq!(code, Some(0), "{what}: {said}");
        let report: serde_json::Value = serde_json::from_str(&said).unwrap();
        for row in report["rows"].as_array().unwrap() {
            assert_eq!(row["path"], "tcp", "{what}: {row}");
            assert!(row["figures"][0]["median"].as_f64().unwrap() > 0.0, "{what}: {row}");
        }
    }
    server.kill();
}
