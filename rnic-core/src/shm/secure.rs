//! Secure execution: whether this program has more rights than the user who started it.

/// Returns true if the kernel set `AT_SECURE` at exec: the program is set-user-ID or set-group-ID,
/// or has file capabilities. Its environment is then another user's and must not be followed.
pub fn is_secure_execution() -> bool {
    // SAFETY: getauxval(3) takes any type, reads the auxiliary vector that the kernel made at exec
    // and that nothing changes later, and returns 0 for a type that is not there.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}
