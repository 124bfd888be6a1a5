//! The requirements that RFC 5040 sections 8.1.1 and 8.1.2 and RFC 5041 sections 8.1 to 8.3 put on
//! the RNIC and on its privileged resource manager, one test or more each, named after them:
//! `RDMAP-8.1.1-7` is `rdmap_8_1_1_7_...`, and a test that shows several carries all their names.
//!
//! [`rnic`] is what the engine owes to everybody, [`manager`] what the resource manager decides.

mod manager;
mod pair;
mod rnic;
