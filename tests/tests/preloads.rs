//! `rnic-run` gives rnicd's libraries to programs that would load another libibverbs: through
//! `DT_RPATH`, under another name, by `dlopen(3)`, or because a script sets `LD_LIBRARY_PATH`. The
//! test compiles small stand-ins, whose functions return a number that identifies the library.

use std::path::{Path, PathBuf};
use std::process::Command;

use rnic_tests::{Daemon, built, copy_files, output_text};
use tempfile::TempDir;

/// Result of the functions of the stand-in for rnicd's libraries.
const OURS: i32 = 7;
/// Result of the functions of other copies.
const OTHER: i32 = 1;
/// Name of a copy, as in a Python wheel.
const RENAMED: &str = "libibverbs-1a2b3c4d.so.1.14.44.0";

/// A folder with programs, with stand-ins for rnicd's libraries in `ours`, and with other copies in
/// `others`.
struct Place {
    folder: TempDir,
    daemon: Daemon,
}

impl Place {
    fn new() -> Self {
        let folder = TempDir::with_prefix("rnic-preloads-").unwrap();
        let place = Place { folder, daemon: Daemon::start("") };
        for name in ["ours", "others", "programs"] {
            std::fs::create_dir(place.at(name)).unwrap();
        }
        let preload = built::libraries().join("librnic_preload.so");
        copy_files(preload, &place.at("ours/librnic_preload.so"));
        place.library("ours/libibverbs.so.1", "libibverbs.so.1", OURS);
        place.library("ours/librdmacm.so.1", "librdmacm.so.1", OURS);
        for name in ["libibverbs.so.1", "librdmacm.so.1", RENAMED, "librdmacm-00ff.so.1"] {
            place.library(&format!("others/{name}"), name, OTHER);
        }
        std::fs::copy(place.at("others/libibverbs.so.1"), place.at("others/libibverbs.so"))
            .unwrap();
        place
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs the C compiler on `text`. `@` in an option is the folder.
    fn compile(&self, text: &str, to: &str, options: &[&str]) -> PathBuf {
        let source = self.at("source.c");
        let to = self.at(to);
        std::fs::write(&source, text).unwrap();
        let mut compiler = Command::new("cc");
        compiler.args(["-w", "-o"]).arg(&to).arg(&source);
        let folder = self.folder.path().to_str().unwrap();
        compiler.args(options.iter().map(|option| option.replace('@', folder)));
        let output = compiler.output().unwrap();
        assert!(output.status.success(), "{}", output_text(&output));
        to
    }

    fn library(&self, to: &str, soname: &str, result: i32) {
        let is_verbs = soname.starts_with("libibverbs");
        let (function, node) =
            if is_verbs { ("ibv_do", "IBVERBS_1.1") } else { ("rdma_do", "RDMACM_1.0") };
        let map = format!("{node} {{ global: {function}; local: *; }};");
        std::fs::write(self.at("versions.map"), map).unwrap();
        let soname = format!("-Wl,-soname,{soname}");
        let script = "-Wl,--version-script=@/versions.map";
        let text = format!("int {function}(void) {{ return {result}; }}");
        self.compile(&text, to, &["-shared", "-fPIC", script, &soname]);
    }

    /// Returns a command that runs a program under `rnic-run`.
    fn command(&self, options: &[&str]) -> Command {
        let mut command = Command::new(built::program("rnic-run"));
        command.arg("--no-start").arg("--lib-dir").arg(self.at("ours")).args(options);
        command.env("RNIC_SOCKET", self.daemon.socket());
        for variable in ["LD_PRELOAD", "LD_LIBRARY_PATH", "RNIC_DEVICES", "RNIC_TREE"] {
            command.env_remove(variable);
        }
        command
    }

    /// Asserts that a program exits with this status, and with another one without `rnic-run`.
    fn exits(&self, program: &Path, status: i32, without: i32) {
        let output = self.command(&[]).arg(program).output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{}", output_text(&output));
        let output = Command::new(program).env("LD_LIBRARY_PATH", self.at("others")).output();
        let output = output.unwrap();
        assert_eq!(output.status.code(), Some(without), "{}", output_text(&output));
    }

    /// Returns the report of `--check`, which finds no problem.
    fn check(&self, program: &Path) -> String {
        let output = self.command(&["--check"]).arg(program).output().unwrap();
        let text = output_text(&output);
        assert_eq!(output.status.code(), Some(0), "{text}");
        text
    }
}

const CALLS: &str = "int main(void) { return ibv_do() + 8 * rdma_do(); }";
const RPATH: &str = "-Wl,--disable-new-dtags,-rpath,@/others";
const RUNPATH: &str = "-Wl,--enable-new-dtags,-rpath,@/others";

#[test]
fn program_with_rpath_gets_ours() {
    let place = Place::new();
    let libraries = ["@/others/libibverbs.so.1", "@/others/librdmacm.so.1"];
    for path in [RPATH, RUNPATH] {
        let options = [path, libraries[0], libraries[1]];
        let program = place.compile(CALLS, "programs/rpath", &options);
        place.exits(&program, 9 * OURS, 9 * OTHER);
        let text = place.check(&program);
        assert!(text.contains("it loads rnicd's libibverbs.so.1, librdmacm.so.1"), "{text}");
    }
    // A path that cannot be in LD_PRELOAD.
    let blank = place.at("with blank");
    std::fs::rename(place.at("ours"), &blank).unwrap();
    let options = [RPATH, libraries[0], libraries[1]];
    let program = place.compile(CALLS, "programs/rpath", &options);
    let mut command = Command::new(built::program("rnic-run"));
    command.arg("--lib-dir").arg(&blank).arg("--check").arg(&program);
    let output = command.env("RNIC_SOCKET", place.daemon.socket()).output().unwrap();
    let text = output_text(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("LD_PRELOAD does not permit"), "{text}");
    assert!(text.contains("which the loader searches before LD_LIBRARY_PATH"), "{text}");
}

#[test]
fn functions_of_a_renamed_copy_are_not_called() {
    let place = Place::new();
    let renamed = format!("@/others/{RENAMED}");
    let options = [RPATH, &*renamed, "@/others/librdmacm-00ff.so.1"];
    let program = place.compile(CALLS, "programs/wheel", &options);
    place.exits(&program, 9 * OURS, 9 * OTHER);
    let text = place.check(&program);
    assert!(text.contains(&format!("others/{RENAMED} too, a copy of libibverbs.so.1")), "{text}");
    assert!(text.contains("librdmacm-00ff.so.1 too, a copy of librdmacm.so.1"), "{text}");
    // A module that links the copy, like a Python extension.
    let module = ["-shared", "-fPIC", RPATH, &*renamed];
    place.compile("int run(void) { return ibv_do(); }", "programs/module.so", &module);
    let host = "#include <dlfcn.h>\n\
        int main(int count, char **words) {\n\
            void *module = dlopen(words[1], RTLD_NOW | RTLD_LOCAL);\n\
            int (*run)(void) = module ? dlsym(module, \"run\") : 0;\n\
            return run ? run() : 99;\n\
        }";
    let host = place.compile(host, "programs/host", &["-ldl"]);
    let output = place.command(&[]).arg(&host).arg(place.at("programs/module.so")).output();
    assert_eq!(output.unwrap().status.code(), Some(OURS));
    // A function that only the copy has.
    let map = "IBVERBS_1.1 { global: ibv_do; ibv_more; local: *; };";
    std::fs::write(place.at("versions.map"), map).unwrap();
    let text = "int ibv_do(void) { return 1; } int ibv_more(void) { return 1; }";
    let soname = format!("-Wl,-soname,{RENAMED}");
    let script = "-Wl,--version-script=@/versions.map";
    let options = ["-shared", "-fPIC", script, &soname];
    place.compile(text, &format!("others/{RENAMED}"), &options);
    let text = "int main(void) { return ibv_do() + ibv_more(); }";
    let program = place.compile(text, "programs/more", &[RPATH, &*renamed]);
    let text = place.check(&program);
    assert!(text.contains("needs functions that only its copy has: ibv_more"), "{text}");
}

#[test]
fn dlopen_of_any_file_name_gets_ours() {
    let place = Place::new();
    let text = "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <errno.h>\n#include <stdio.h>\n\
        int main(int count, char **words) {\n\
            for (char **word = words + 1; *word; word++) {\n\
                errno = 77;\n\
                void *library = dlopen(*word, RTLD_NOW);\n\
                int (*run)(void) = library ? dlsym(library, \"ibv_do\") : 0;\n\
                int (*same)(void) = library ? dlvsym(library, \"ibv_do\", \"IBVERBS_1.1\") : 0;\n\
                printf(\"%d\\n\", run && run == same ? run() : -1);\n\
            }\n\
            void *cm = dlopen(\"librdmacm.so\", RTLD_NOW);\n\
            int (*run)(void) = cm ? dlsym(cm, \"rdma_do\") : 0;\n\
            void *self = dlopen(NULL, RTLD_NOW);\n\
            printf(\"%d %d %s\\n\", run ? run() : -1, self && dlsym(self, \"main\"),\n\
                   dlopen(\"libplain.so\", RTLD_NOW) ? \"plain\" : dlerror());\n\
        }";
    place.compile("int plain;", "others/libplain.so", &["-shared", "-fPIC"]);
    place.library("others/libibverbs-other.so", "libibverbs-other.so", OTHER);
    // The library without a path is found by the path in the program.
    let program = place.compile(text, "programs/dlopen", &["-ldl", "-rdynamic", RUNPATH]);
    let others = place.at("others");
    let full = |name: &str| others.join(name).to_str().unwrap().to_owned();
    let names = [
        ("libibverbs.so.1".to_owned(), OURS),
        ("libibverbs.so".to_owned(), OURS),
        (RENAMED.to_owned(), OURS),
        (full("libibverbs.so.1"), OURS),
        (full("libibverbs.so"), OURS),
        (full(RENAMED), OURS),
        ("/no/such/folder/libibverbs.so.1".to_owned(), OURS),
        // Other libraries are not replaced.
        (full("libibverbs-other.so"), OTHER),
        ("libibverbs.so1".to_owned(), -1),
        ("libibverbs".to_owned(), -1),
    ];
    let mut command = place.command(&[]);
    command.arg(&program).args(names.iter().map(|(name, _)| name));
    let output = command.output().unwrap();
    let expected: String = names.iter().map(|(_, result)| format!("{result}\n")).collect();
    assert_eq!(output_text(&output), format!("{expected}{OURS} 1 plain\n"));
    let text = place.check(&program);
    assert!(text.contains("(dlopen), under any path or name, it gets rnicd's"), "{text}");
}

#[test]
fn script_with_its_own_library_path_gets_ours() {
    let place = Place::new();
    let libraries = ["@/others/libibverbs.so.1", "@/others/librdmacm.so.1"];
    let program = place.compile(CALLS, "programs/plain", &libraries);
    let script = place.at("programs/script");
    let text = format!(
        "#!/bin/sh\nexport LD_LIBRARY_PATH={}\n{}\n",
        place.at("others").display(),
        program.display()
    );
    std::fs::write(&script, text).unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&script, open).unwrap();
    place.exits(&script, 9 * OURS, 9 * OTHER);
    let text = place.check(&script);
    assert!(text.contains("it sets LD_LIBRARY_PATH; programs that it starts get"), "{text}");
    std::fs::write(&script, "#!/bin/sh\nLD_PRELOAD=libmine.so exec true\n").unwrap();
    let text = place.check(&script);
    assert!(text.contains("it sets LD_PRELOAD; programs that it starts"), "{text}");
}

#[test]
fn nested_rnic_run_shows_the_same_files() {
    let place = Place::new();
    let nested = place.command(&[]).arg(built::program("rnic-run")).args(PRINT_TREE).output();
    let nested = nested.unwrap();
    let direct = place.command(&[]).args(PRINT_TREE).output().unwrap();
    assert!(direct.stdout.starts_with(b"/") && direct.stdout.ends_with(b"\nrnicd1\n"));
    assert_eq!(output_text(&nested), output_text(&direct));
}

/// Prints the folder of the device files, and the devices in it.
const PRINT_TREE: [&str; 3] = ["sh", "-c", "echo $RNIC_TREE; ls /sys/class/infiniband"];

/// Every program that a shell starts maps the libraries, so loading them must not start a thread or
/// open a descriptor.
#[test]
fn libraries_do_nothing_when_loaded() {
    let daemon = Daemon::start("");
    let place = Place::new();
    let script = "echo $(ls /proc/self/task | wc -l) $(ls -l /proc/self/fd | grep -c -- '->'); \
                  grep -c libibverbs /proc/self/maps";
    let shell = ["sh", "-c", script];
    let mut command = Command::new(built::program("rnic-run"));
    command.arg("--no-start").arg("--lib-dir").arg(built::libraries()).args(shell);
    command.env("RNIC_SOCKET", daemon.socket());
    let with = output_text(&command.output().unwrap());
    let without = output_text(&Command::new("sh").args(&shell[1..]).output().unwrap());
    let first = |text: &str| text.lines().next().map(str::to_owned);
    assert_eq!(first(&with), first(&without));
    assert!(!with.ends_with("\n0\n") && without.ends_with("\n0\n"), "{with} {without}");
    // A program calls its own library's function even if rsockets has a function of that name.
    place.compile("int rsend(void) { return 42; }", "others/libown.so", &["-shared", "-fPIC"]);
    let options = ["@/others/libown.so", RUNPATH];
    let text = "int main(void) { return rsend(); }";
    let program = place.compile(text, "programs/own", &options);
    let mut command = Command::new(built::program("rnic-run"));
    command.arg("--no-start").arg("--lib-dir").arg(built::libraries()).arg(&program);
    let output = command.env("RNIC_SOCKET", daemon.socket()).output().unwrap();
    assert_eq!(output.status.code(), Some(42), "{}", output_text(&output));
}
