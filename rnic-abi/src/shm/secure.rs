//! Detects secure execution: a program with more rights than the user that started it.

/// Returns true if the kernel set `AT_SECURE` at exec: the program is set-user-ID or set-group-ID,
/// or has file capabilities. Another user then controls its environment, which must be ignored.
pub fn is_secure_execution() -> bool {
    // SAFETY: getauxval(3) accepts any type, reads the auxiliary vector, which the kernel made at
    // exec and which does not change later, and returns 0 for a type that the vector lacks.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}
