//! Translates filters to classic BPF over `struct seccomp_data`.
//!
//! The crate `seccompiler` is not used, because its filters have one action for denied calls and
//! these have three. Each rule is a few instructions that end in an action or fall through to the
//! next rule. The system call number stays in the accumulator. The kernel (since 5.11) keeps a
//! bitmap of the numbers that are always allowed, as almost all are; for those the length of the
//! program costs nothing.

use libc::c_long;

/// A permission of a thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rule {
    /// This system call, with any arguments.
    Any(c_long),
    /// This system call, unless an argument (from 0) has one of these bits.
    Without(c_long, u8, u32),
    /// This system call, if an argument (from 0), an `int`, has one of these values.
    OneOf(c_long, u8, Vec<u32>),
}

/// Effect on calls that no rule allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denied {
    /// They fail. Hostile calls end the process.
    Refused,
    /// They are allowed and logged.
    Logged,
}

/// One instruction of classic BPF.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instruction {
    code: u32,
    /// Instructions to skip if the condition is true.
    then: u8,
    /// Instructions to skip if the condition is false.
    otherwise: u8,
    operand: u32,
}

impl Instruction {
    /// Returns the instruction in the kernel's format.
    pub fn encoded(self) -> libc::sock_filter {
        // Codes have eight bits.
        let code = self.code as u16;
        libc::sock_filter { code, jt: self.then, jf: self.otherwise, k: self.operand }
    }
}

/// Returns the filter of these rules, or `None` on an architecture that is not supported.
pub fn assemble(rules: &[Rule], hostile: &[c_long], denied: Denied) -> Option<Vec<Instruction>> {
    let (kill, unknown, refuse) = match denied {
        Denied::Refused => (ret::KILL_PROCESS, errno(libc::ENOSYS), errno(libc::EPERM)),
        Denied::Logged => (ret::LOG, ret::LOG, ret::LOG),
    };
    let mut program = vec![
        load(ARCHITECTURE_AT),
        // System calls of another architecture (32-bit x86) have other numbers.
        jump(libc::BPF_JEQ, ARCHITECTURE?, 1, 0),
        answer(ret::KILL_PROCESS),
        load(NUMBER_AT),
    ];
    for rule in rules {
        rule.emit(refuse, &mut program);
    }
    for call in hostile {
        program.push(jump(libc::BPF_JEQ, number(*call), 0, 1));
        program.push(answer(kill));
    }
    // Also covers the numbers of the x32 ABI, which have a high bit set.
    program.push(jump(libc::BPF_JGT, NEWEST, 0, 1));
    program.push(answer(unknown));
    program.push(answer(refuse));
    Some(program)
}

impl Rule {
    fn emit(&self, refuse: u32, program: &mut Vec<Instruction>) {
        let equal = |call: &c_long, otherwise| jump(libc::BPF_JEQ, number(*call), 0, otherwise);
        match self {
            Rule::Any(call) => program.extend([equal(call, 1), answer(ret::ALLOW)]),
            Rule::Without(call, argument, bits) => program.extend([
                equal(call, 4),
                load(argument_at(*argument)),
                jump(libc::BPF_JSET, *bits, 1, 0),
                answer(ret::ALLOW),
                answer(refuse),
            ]),
            Rule::OneOf(call, argument, values) => {
                // A handful: the lists are in `calls`.
                let len = values.len() as u8;
                program.push(equal(call, len + 3));
                program.push(load(argument_at(*argument)));
                let tests = (0..len).zip(values);
                program.extend(tests.map(|(n, v)| jump(libc::BPF_JEQ, *v, len - n, 0)));
                program.extend([answer(refuse), answer(ret::ALLOW)]);
            }
        }
    }
}

fn load(offset: u32) -> Instruction {
    let code = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    Instruction { code, then: 0, otherwise: 0, operand: offset }
}

fn jump(condition: u32, operand: u32, then: u8, otherwise: u8) -> Instruction {
    let code = libc::BPF_JMP | condition | libc::BPF_K;
    Instruction { code, then, otherwise, operand }
}

fn answer(action: u32) -> Instruction {
    let code = libc::BPF_RET | libc::BPF_K;
    Instruction { code, then: 0, otherwise: 0, operand: action }
}

fn errno(number: i32) -> u32 {
    // Small and positive.
    libc::SECCOMP_RET_ERRNO | number as u32
}

fn number(call: c_long) -> u32 {
    // Small and positive.
    call as u32
}

/// Offset of the low half of an argument on the supported machines, which are little-endian.
fn argument_at(argument: u8) -> u32 {
    16 + 8 * u32::from(argument)
}

/// `offsetof(struct seccomp_data, nr)`
const NUMBER_AT: u32 = 0;
/// `offsetof(struct seccomp_data, arch)`
const ARCHITECTURE_AT: u32 = 4;

/// `AUDIT_ARCH_*` of this machine.
pub const ARCHITECTURE: Option<u32> = if cfg!(target_endian = "big") {
    None
} else if cfg!(target_arch = "x86_64") {
    Some(0xC000_003E)
} else if cfg!(target_arch = "aarch64") {
    Some(0xC000_00B7)
} else {
    None
};

/// The newest call that `calls` considers: `futex_waitv`, Linux 5.16, the same on both
/// architectures.
const NEWEST: u32 = 449;

/// `SECCOMP_RET_*`
pub mod ret {
    pub use libc::{
        SECCOMP_RET_ALLOW as ALLOW, SECCOMP_RET_KILL_PROCESS as KILL_PROCESS,
        SECCOMP_RET_LOG as LOG,
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the action that the kernel would take.
    fn run(program: &[Instruction], arch: u32, nr: u32, args: [u32; 6]) -> u32 {
        let mut accumulator = 0;
        let mut at = 0;
        loop {
            let Instruction { code, then, otherwise, operand } = program[at];
            at += 1;
            let skip = |holds| usize::from(if holds { then } else { otherwise });
            at += match code & 0x07 {
                libc::BPF_RET => return operand,
                libc::BPF_LD => {
                    accumulator = match operand {
                        NUMBER_AT => nr,
                        ARCHITECTURE_AT => arch,
                        offset => args[(offset as usize - 16) / 8],
                    };
                    0
                }
                _ => match code & 0xf0 {
                    libc::BPF_JEQ => skip(accumulator == operand),
                    libc::BPF_JGT => skip(accumulator > operand),
                    libc::BPF_JSET => skip(accumulator & operand != 0),
                    other => panic!("jump {other:#x}"),
                },
            };
        }
    }

    #[test]
    fn each_rule_covers_only_its_call() {
        let Some(arch) = ARCHITECTURE else { return };
        let rules = [
            Rule::Any(10),
            Rule::Without(20, 2, 0b110),
            Rule::OneOf(30, 0, vec![1, 2, 10]),
            Rule::OneOf(31, 5, vec![7]),
            Rule::Any(40),
        ];
        let Some(program) = assemble(&rules, &[50], Denied::Refused) else { panic!() };
        let answers = |nr, args| run(&program, arch, nr, args);
        let eperm = errno(libc::EPERM);
        let enosys = errno(libc::ENOSYS);
        let argument = |n: usize, value| {
            let mut args = [0; 6];
            args[n] = value;
            args
        };
        for (nr, args, expected) in [
            (10, [0; 6], ret::ALLOW),
            (11, [0; 6], eperm),
            (20, argument(2, 1), ret::ALLOW),
            (20, argument(2, 0b101), eperm),
            (20, argument(2, 2), eperm),
            (30, argument(0, 1), ret::ALLOW),
            (30, argument(0, 2), ret::ALLOW),
            (30, argument(0, 10), ret::ALLOW),
            (30, argument(0, 3), eperm),
            (31, argument(5, 7), ret::ALLOW),
            (31, argument(5, 0), eperm),
            (40, [0; 6], ret::ALLOW),
            (50, [0; 6], ret::KILL_PROCESS),
            (NEWEST, [0; 6], eperm),
            (NEWEST + 1, [0; 6], enosys),
            (0x4000_0000 + 10, [0; 6], enosys),
        ] {
            assert_eq!(answers(nr, args), expected, "{nr} {args:?}");
        }
        assert_eq!(run(&program, arch ^ 1, 10, [0; 6]), ret::KILL_PROCESS);
        let Some(program) = assemble(&rules, &[50], Denied::Logged) else { panic!() };
        assert_eq!(run(&program, arch, 50, [0; 6]), ret::LOG);
        assert_eq!(run(&program, arch, 11, [0; 6]), ret::LOG);
        assert_eq!(run(&program, arch, 10, [0; 6]), ret::ALLOW);
    }
}
