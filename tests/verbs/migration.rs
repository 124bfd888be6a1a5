//! Live migration of a virtual machine over RDMA (QEMU). The guest (`guest.s`) checks its memory in
//! each pass.

use std::path::PathBuf;
use std::process::Command;
use std::sync::PoisonError;
use std::time::Instant;

use rnic_tests::{DEADLINE, Process, installed};

use crate::ALONE;
use crate::case::{Group, Setting};
use crate::stage::{CLIENT, SERVER, Stage};

/// The capability `rdma-pin-all`.
pub const PIN_ALL: [&str; 2] = ["off", "on"];

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/verbs/guest.s");

/// Bytes that the guest has written, at least.
const WRITTEN: u64 = 20 << 20;

/// The group for [`Stage::new`].
const GROUP: Group = Group {
    program: "qemu-system-x86_64",
    package: "qemu-system-x86",
    manner: "",
    devices: "",
    config: "",
    cases: &[],
};

/// A virtual machine, and the file of its serial port.
struct Machine {
    process: Process,
    serial: PathBuf,
}

impl Machine {
    /// Starts a machine with the guest. `options` are those of QEMU.
    fn start(stage: &Stage, end: usize, options: &str) -> Self {
        let serial = stage.folder(end).join("serial");
        let image = stage.scratch().join("guest");
        let words = format!(
            "qemu-system-x86_64 -nodefaults -display none -accel tcg -m 64 -monitor stdio \
             -serial file:{} -drive file={},format=raw,if=floppy,readonly=on {options}",
            serial.display(),
            image.display()
        );
        Machine { process: stage.start(end, &words), serial }
    }

    /// Sets the capabilities and limits of a migration.
    fn set_up(&mut self, pin_all: &str) {
        let set = format!("migrate_set_capability rdma-pin-all {pin_all}");
        self.process.ask(&set, "migrate_set_capability");
        // The guest writes faster than a busy host sends.
        self.process.ask("migrate_set_parameter downtime-limit 60000", "downtime-limit");
    }

    /// Returns the guest's output at this end. A migration may split a line.
    fn printed(&self) -> String {
        std::fs::read_to_string(&self.serial).unwrap_or_default()
    }

    /// Waits until the guest has completed three passes here.
    fn runs(&self) {
        let deadline = Instant::now() + DEADLINE;
        while self.printed().matches('\n').count() < 4 {
            assert!(Instant::now() < deadline, "the guest does not run");
            std::thread::yield_now();
        }
    }

    /// Waits until its migration has ended, and returns the status.
    fn migrated(&mut self) -> String {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let status = self.process.ask("info migrate", "Migration status: ");
            if !["setup", "active", "device"].contains(&status.as_str()) {
                return status;
            }
            assert!(Instant::now() < deadline, "{status}");
        }
    }
}

/// Returns the number of each pass in a text.
fn passes(text: &str) -> Vec<u32> {
    let complete = text.rfind('\n').map_or("", |end| &text[..end]);
    let number = |line| u32::from_str_radix(line, 16).unwrap_or_else(|_| panic!("{text}"));
    complete.lines().map(number).collect()
}

/// Assembles the guest.
fn assemble(stage: &Stage) {
    let [object, image] = ["guest.o", "guest"].map(|name| stage.scratch().join(name));
    let mut assembler = Command::new("as");
    assembler.args(["--32", "-o"]).args([&object, &PathBuf::from(SOURCE)]);
    Process::start(assembler).succeed();
    let mut linker = Command::new("ld");
    linker.args(["-m", "elf_i386", "-Ttext=0x7c00", "--oformat=binary", "-o"]);
    Process::start({
        linker.args([&image, &object]);
        linker
    })
    .succeed();
}

/// The guest runs on at the other end, from the pass in which it was stopped.
fn guest_keeps_its_memory(setting: Setting) {
    if !installed("as", "binutils") {
        return;
    }
    let Some(stage) = Stage::new(setting, &GROUP) else { return };
    assemble(&stage);
    let address = format!("rdma:{}:7000", stage.side(SERVER).ip());
    for pin_all in PIN_ALL {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let before = stage.read_figures();
        let mut target = Machine::start(&stage, SERVER, &format!("-incoming {address}"));
        target.set_up(pin_all);
        let mut source = Machine::start(&stage, CLIENT, "");
        source.set_up(pin_all);
        source.runs();
        source.process.ask(&format!("migrate -d {address}"), "migrate");
        assert_eq!(source.migrated(), "completed");
        target.runs();
        assert_eq!(target.process.ask("info status", "VM status: "), "running");
        let mut text = String::new();
        for machine in [&mut source, &mut target] {
            machine.process.ask("quit", "quit");
            assert!(machine.process.ends_within(DEADLINE), "{setting:?}");
            text += &machine.printed();
        }
        let passes = passes(&text);
        stage.is_empty();
        drop(alone);
        let expected: Vec<u32> = (1..).take(passes.len()).collect();
        assert_eq!(passes, expected, "rdma-pin-all {pin_all}");
        let after = stage.read_figures();
        if let Err(why) = stage.went_over(WRITTEN, &before, &after) {
            panic!("rdma-pin-all {pin_all}: {why}");
        }
    }
}

in_each_setting!(guest_keeps_its_memory);
