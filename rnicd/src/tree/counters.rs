//! Counters with the kernel's names and units (`ABI/stable/sysfs-class-infiniband`): the port
//! counters of the InfiniBand architecture, and those driver-specific counters of similar adapters
//! for which the daemon has the same statistic.

use std::path::PathBuf;

use rnic_abi::abi::control::QpCounters;

/// Sums over all QPs of a device since the start, including destroyed QPs.
pub type Sums = QpCounters;

/// A counter of a device's port.
struct Counter {
    name: &'static str,
    of: fn(&Sums) -> u64,
}

const fn counter(name: &'static str, of: fn(&Sums) -> u64) -> Counter {
    Counter { name, of }
}

const NONE: fn(&Sums) -> u64 = |_| 0;

/// Counters in `counters`. Data counters are in units of 4 bytes. Counters without a meaning here
/// are zero.
const COUNTERS: [Counter; 21] = [
    counter("VL15_dropped", NONE),
    counter("excessive_buffer_overrun_errors", NONE),
    counter("link_downed", NONE),
    counter("link_error_recovery", NONE),
    counter("local_link_integrity_errors", NONE),
    counter("multicast_rcv_packets", NONE),
    counter("multicast_xmit_packets", NONE),
    counter("port_rcv_constraint_errors", NONE),
    counter("port_rcv_data", |sums| sums.bytes_received / 4),
    counter("port_rcv_errors", NONE),
    counter("port_rcv_packets", |sums| sums.segments_received),
    counter("port_rcv_remote_physical_errors", NONE),
    counter("port_rcv_switch_relay_errors", NONE),
    counter("port_xmit_constraint_errors", NONE),
    counter("port_xmit_data", |sums| sums.bytes_sent / 4),
    counter("port_xmit_discards", NONE),
    counter("port_xmit_packets", |sums| sums.segments_sent),
    counter("port_xmit_wait", NONE),
    counter("symbol_error", NONE),
    counter("unicast_rcv_packets", |sums| sums.segments_received),
    counter("unicast_xmit_packets", |sums| sums.segments_sent),
];

/// Counters in `hw_counters`: Read requests answered, under the names of mlx5 and irdma.
const DRIVERS: [Counter; 2] = [
    counter("rx_read_requests", |sums| sums.reads_answered),
    counter("iwInRdmaReads", |sums| sums.reads_answered),
];

/// Returns the counter files with their text, by path below the root of the tree.
pub(super) fn files(device: &str, sums: &Sums) -> Vec<(PathBuf, String)> {
    let port = port_folder(device);
    let file = |folder: &str, counter: &Counter| {
        let path = PathBuf::from(format!("{port}/{folder}/{}", counter.name));
        (path, format!("{}\n", (counter.of)(sums)))
    };
    let common = COUNTERS.iter().map(|counter| file("counters", counter));
    common.chain(DRIVERS.iter().map(|counter| file("hw_counters", counter))).collect()
}

/// Returns the path of a device's port below the root of the tree.
pub(super) fn port_folder(device: &str) -> String {
    format!("devices/rnicd/{device}/infiniband/{device}/ports/1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_are_counted_in_units_of_four_bytes() {
        let sums = Sums { bytes_sent: 4003, reads_answered: 7, ..Sums::default() };
        let all = files("rnicd1", &sums);
        let value = |name: &str| {
            let found = all.iter().find(|(path, _)| path.ends_with(name));
            found.map(|(_, text)| text.as_str())
        };
        assert_eq!(value("counters/port_xmit_data"), Some("1000\n"));
        assert_eq!(value("counters/port_rcv_data"), Some("0\n"));
        assert_eq!(value("hw_counters/rx_read_requests"), Some("7\n"));
    }
}
