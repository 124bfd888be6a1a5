//! Gives pods of a Kubernetes cluster the RDMA devices of rnicd.
//!
//! [`plugin`] serves the kubelet of a node and registers with it. [`service`] lists shares of the
//! device, which are healthy while [`daemon`] serves programs, and [`allocation`] makes the mounts
//! and variables of a container. [`api`] is the protocol of the kubelet, [`options`] the command
//! line.

pub mod allocation;
pub mod api;
pub mod daemon;
pub mod options;
pub mod plugin;
pub mod service;

/// Prints a line to standard error, the log of a pod. Ignores failures.
fn log(text: &str) {
    let _ = std::io::Write::write_all(
        &mut std::io::stderr(),
        format!("rnic-device-plugin: {text}\n").as_bytes(),
    );
}
