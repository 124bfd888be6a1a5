//! The system calls that each kind of thread needs.
//!
//! Collected by running every test under `strace -f`, and by reading the libraries: the standard
//! library, `mio`, `rustix`, and the allocators, threads and thread exits of glibc and musl. One
//! denial is expected: glibc opens `/proc/sys/vm/overcommit_memory` the first time it trims a
//! thread's heap, and assumes the default if that fails.

use libc::c_long;

use super::ThreadKind;
use super::program::Rule;

/// Returns the rules of a kind of thread.
pub fn rules_of(kind: ThreadKind) -> Vec<Rule> {
    let mut rules: Vec<Rule> = COMMON.iter().copied().map(Rule::Any).collect();
    let mut allow = |calls: &[c_long]| rules.extend(calls.iter().copied().map(Rule::Any));
    match kind {
        // To clear a client's SO_LINGER, to discard a client's packets, and to interrupt waits.
        ThreadKind::Reaper => allow(&[
            libc::SYS_recvmsg,
            libc::SYS_setsockopt,
            libc::SYS_timer_create,
            libc::SYS_timer_delete,
            libc::SYS_timer_settime,
        ]),
        ThreadKind::Log => allow(&[libc::SYS_writev]),
        ThreadKind::ConfigReader => {
            allow(&[libc::SYS_fstat, libc::SYS_lseek, libc::SYS_newfstatat, libc::SYS_statx]);
            rules.push(Rule::Without(libc::SYS_openat, 2, CHANGING));
            #[cfg(target_arch = "x86_64")]
            rules.push(Rule::Without(libc::SYS_open, 1, CHANGING));
        }
        ThreadKind::Addresses => {
            allow(&[
                libc::SYS_bind,
                libc::SYS_getsockname,
                libc::SYS_recvfrom,
                libc::SYS_recvmsg,
                libc::SYS_sendto,
            ]);
            // Addresses are read over netlink, the index of an interface by an ioctl on any socket.
            let families = vec![libc::AF_NETLINK as u32, UNIX];
            rules.push(Rule::OneOf(libc::SYS_socket, 0, families));
            rules.push(Rule::OneOf(libc::SYS_ioctl, 1, vec![libc::SIOCGIFINDEX as u32]));
        }
        ThreadKind::Worker => {
            allow(MOVE);
            // With AF_UNSPEC it resets a connection whose socket a client may also hold.
            allow(&[libc::SYS_connect]);
            // For the thread's own time slices.
            rules.push(Rule::OneOf(libc::SYS_sched_getattr, 0, vec![0]));
            rules.push(Rule::OneOf(libc::SYS_sched_setattr, 0, vec![0]));
        }
        ThreadKind::Control => {
            allow(MOVE);
            allow(OPEN);
            allow(OPEN_OLD);
            // For devices that appear in the device tree.
            allow(&[libc::SYS_mkdirat, libc::SYS_symlinkat]);
            rules.push(Rule::OneOf(libc::SYS_socket, 0, FAMILIES.to_vec()));
            rules.push(Rule::OneOf(libc::SYS_socketpair, 0, vec![UNIX]));
            rules.push(Rule::OneOf(libc::SYS_ioctl, 1, vec![libc::FIONBIO as u32]));
            // Limits of this process only.
            rules.push(Rule::OneOf(libc::SYS_prlimit64, 0, vec![0]));
        }
    }
    // `abort` raises a signal, in this process only.
    rules.push(Rule::OneOf(libc::SYS_tgkill, 0, vec![std::process::id()]));
    // All code is mapped before the filter is installed.
    rules.push(Rule::Without(libc::SYS_mmap, 2, EXECUTABLE));
    rules.push(Rule::Without(libc::SYS_mprotect, 2, EXECUTABLE));
    rules
}

/// Memory, waiting, wake-ups, time, ends of threads and of the process.
const COMMON: &[c_long] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fcntl,
    libc::SYS_futex,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_madvise,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_read,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_write,
];

/// Copying data between descriptors and memory, and waiting for descriptors.
const MOVE: &[c_long] = &[
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_writev,
];

/// Files, sockets and other new descriptors.
const OPEN: &[c_long] = &[
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_epoll_create1,
    libc::SYS_eventfd2,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fallocate,
    libc::SYS_fchmod,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_listen,
    libc::SYS_lseek,
    libc::SYS_memfd_create,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal,
    libc::SYS_pipe2,
    libc::SYS_readlinkat,
    libc::SYS_renameat2,
    libc::SYS_statx,
    libc::SYS_unlinkat,
];

/// Older variants of calls in `OPEN`. Architectures other than x86_64 have few of them.
#[cfg(target_arch = "x86_64")]
const OPEN_OLD: &[c_long] = &[
    libc::SYS_access,
    libc::SYS_dup2,
    libc::SYS_lstat,
    libc::SYS_open,
    libc::SYS_readlink,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_stat,
    libc::SYS_unlink,
];
/// `renameat`: the C library calls it, but the crate `libc` does not define it here.
#[cfg(target_arch = "aarch64")]
const OPEN_OLD: &[c_long] = &[38];
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const OPEN_OLD: &[c_long] = &[];

/// System calls that neither the daemon nor a library on its own makes: signs of an attack.
pub const HOSTILE: &[c_long] = &[
    libc::SYS_add_key,
    libc::SYS_bpf,
    libc::SYS_chroot,
    libc::SYS_delete_module,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_finit_module,
    libc::SYS_fsopen,
    libc::SYS_init_module,
    libc::SYS_io_uring_setup,
    libc::SYS_kexec_load,
    libc::SYS_keyctl,
    libc::SYS_mount,
    libc::SYS_move_mount,
    libc::SYS_open_by_handle_at,
    libc::SYS_open_tree,
    libc::SYS_perf_event_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pivot_root,
    libc::SYS_process_madvise,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_ptrace,
    libc::SYS_reboot,
    libc::SYS_request_key,
    libc::SYS_setgid,
    libc::SYS_setgroups,
    libc::SYS_setns,
    libc::SYS_setregid,
    libc::SYS_setresgid,
    libc::SYS_setresuid,
    libc::SYS_setreuid,
    libc::SYS_setuid,
    libc::SYS_swapon,
    libc::SYS_umount2,
    libc::SYS_unshare,
    libc::SYS_userfaultfd,
];

const EXECUTABLE: u32 = libc::PROT_EXEC as u32;
/// Flags of `open` for any access other than reading existing files.
const CHANGING: u32 = (libc::O_WRONLY | libc::O_RDWR | libc::O_CREAT | libc::O_TRUNC) as u32;
const UNIX: u32 = libc::AF_UNIX as u32;
/// For control sockets and notifications (Unix), and for connections.
const FAMILIES: &[u32] = &[UNIX, libc::AF_INET as u32, libc::AF_INET6 as u32];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_is_allowed_ends_the_process() {
        for kind in ThreadKind::ALL {
            for rule in rules_of(kind) {
                let (Rule::Any(call) | Rule::Without(call, ..) | Rule::OneOf(call, ..)) = rule;
                assert!(!HOSTILE.contains(&call), "{kind:?}: {call}");
            }
        }
    }
}
