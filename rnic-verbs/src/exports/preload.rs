//! The functions for `librnic_preload.so`, which finds them by name in a program that asks for
//! objects or changes links by netlink. That library has no client of the daemon.

use super::publish;
use crate::rdma::*;

publish! { "RNIC_1" as "rnicd_": rdma_objects, rdma_link_add, rdma_link_delete }
