//! The requirements of RFC 5040 sections 8.1.1 and 8.1.2 and RFC 5041 sections 8.1 to 8.3 for the
//! RNIC and its privileged resource manager. Each has at least one test, named after it:
//! `RDMAP-8.1.1-7` is `rdmap_8_1_1_7_...`. A test for several requirements names the first one; the
//! comments above it list all of them.
//!
//! [`rnic`] tests the engine, and [`manager`] the resource manager.

mod manager;
mod pair;
mod rnic;
