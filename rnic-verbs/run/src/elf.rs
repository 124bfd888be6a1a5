//! What the program loader reads of a file: for which machine it is, by whom it is loaded, what it
//! needs and what it offers.

use std::collections::HashSet;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use object::Endianness;
use object::elf::{self, FileHeader32, FileHeader64};
use object::read::elf::{FileHeader, ProgramHeader, SectionTable, Sym};
use object::read::{ReadCache, ReadRef};

/// Why a file is no program and no library.
#[derive(Debug, thiserror::Error)]
pub enum ElfError {
    /// It cannot be read.
    #[error("{} cannot be read: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// It is something else.
    #[error("{} is no ELF file", path.display())]
    NotElf {
        /// The file.
        path: PathBuf,
    },
    /// It is damaged.
    #[error("{} is damaged: {error}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: object::read::Error,
    },
}

/// A program or a library.
#[derive(Debug)]
pub struct Elf {
    /// For which machine it is.
    pub target: Target,
    /// The program that loads it; none for libraries and static programs.
    pub interpreter: Option<PathBuf>,
    /// Libraries that are loaded with it.
    pub needed: Vec<String>,
    /// `DT_RPATH`: where its libraries, and theirs, are looked for first.
    pub rpath: Option<String>,
    /// `DT_RUNPATH`: where its libraries are looked for after `LD_LIBRARY_PATH`.
    pub runpath: Option<String>,
    /// Symbols that must come from elsewhere.
    pub imports: Vec<Import>,
    /// What others can take from it: names, and the versions they have.
    pub exports: HashSet<(String, Option<String>)>,
}

/// A kind of machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// `e_machine`.
    pub machine: elf::Machine,
    /// 64 bits rather than 32.
    pub wide: bool,
    /// The most significant byte first.
    pub big_endian: bool,
}

/// A symbol that must come from elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Import {
    /// Its name.
    pub name: String,
    /// The version that was there when it was linked.
    pub version: Option<String>,
    /// The library that had it then, by its SONAME.
    pub library: Option<String>,
    /// Whether it may be missing.
    pub weak: bool,
}

impl Elf {
    /// Reads of a file what the loader would: programs may have gigabytes that it does not.
    pub fn read(path: &Path) -> Result<Self, ElfError> {
        let owned = || path.to_owned();
        let mut start = Vec::new();
        let opened = File::open(path).and_then(|mut file| {
            (&mut file).take(IDENTITY).read_to_end(&mut start)?;
            Ok(file)
        });
        let file = opened.map_err(|error| ElfError::Read { path: owned(), error })?;
        if start.get(..4) != Some(&elf::ELFMAG) {
            return Err(ElfError::NotElf { path: owned() });
        }
        let data = ReadCache::new(file);
        let parsed = match start.get(4) {
            Some(&class) if class == elf::ELFCLASS32.0 => {
                parse::<FileHeader32<Endianness>, _>(&data)
            }
            _ => parse::<FileHeader64<Endianness>, _>(&data),
        };
        parsed.map_err(|error| ElfError::Damaged { path: owned(), error })
    }

    /// Whether it is the program that loads others (ld.so(8)), which has what debuggers look for.
    pub fn is_loader(&self) -> bool {
        self.interpreter.is_none() && self.exports.iter().any(|(name, _)| name == "_r_debug")
    }

    /// The machine that this process runs on, as its own program has it.
    pub fn here() -> Result<Target, ElfError> {
        Elf::read(Path::new("/proc/self/exe")).map(|own| own.target)
    }
}

fn parse<'data, H: FileHeader<Endian = Endianness>, R: ReadRef<'data>>(
    data: R,
) -> object::read::Result<Elf> {
    let header = H::parse(data)?;
    let endian = header.endian()?;
    let target = Target {
        machine: header.e_machine(endian),
        wide: header.is_type_64(),
        big_endian: header.is_big_endian(),
    };
    let mut interpreter = None;
    for segment in header.program_headers(endian, data)? {
        interpreter = interpreter.or(segment.interpreter(endian, data)?.map(text));
    }
    let sections = header.sections(endian, data)?;
    let mut found = Elf {
        target,
        interpreter: interpreter.map(PathBuf::from),
        needed: Vec::new(),
        rpath: None,
        runpath: None,
        imports: Vec::new(),
        exports: HashSet::new(),
    };
    let dynamic = sections.dynamic_table(endian, data)?;
    for entry in dynamic.iter() {
        let value = || dynamic.string(entry).map(text);
        match entry.tag {
            elf::DT_NEEDED => found.needed.push(value()?),
            elf::DT_RPATH => found.rpath = Some(value()?),
            elf::DT_RUNPATH => found.runpath = Some(value()?),
            _ => {}
        }
    }
    symbols(&sections, endian, data, &mut found)?;
    Ok(found)
}

/// Sorts the dynamic symbols into what is imported and what is exported.
fn symbols<'data, H: FileHeader<Endian = Endianness>, R: ReadRef<'data>>(
    sections: &SectionTable<'data, H, R>,
    endian: Endianness,
    data: R,
    found: &mut Elf,
) -> object::read::Result<()> {
    let table = sections.symbols(endian, data, elf::SHT_DYNSYM)?;
    let versions = sections.versions(endian, data)?.unwrap_or_default();
    for (index, symbol) in table.enumerate().skip(1) {
        let name = text(symbol.name(endian, table.strings())?);
        let number = versions.version_index(endian, index);
        let version = versions.version(number.index())?;
        let (version, library) = (
            version.map(|version| text(version.name())),
            version.and_then(|version| version.file()).map(text),
        );
        if symbol.is_undefined(endian) {
            let weak = symbol.st_bind() == elf::STB_WEAK;
            found.imports.push(Import { name, version, library, weak });
        } else if !symbol.is_local() {
            found.exports.insert((name, version));
        }
    }
    Ok(())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Bytes at a file's begin that say what it is: `e_ident`.
const IDENTITY: u64 = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_test_is_a_program_for_this_machine() {
        let own = Elf::read(Path::new("/proc/self/exe")).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(Elf::here().ok(), Some(own.target));
        assert!(own.needed.iter().any(|name| name.starts_with("libc.so")), "{:?}", own.needed);
        let malloc = own.imports.iter().find(|import| import.name == "malloc");
        assert!(malloc.is_some_and(|import| import.version.is_some()), "{malloc:?}");
        assert!(own.interpreter.is_some_and(|path| path.exists()));
    }

    #[test]
    fn other_files_are_said_to_be_no_programs() {
        let file = tempfile::NamedTempFile::new().unwrap_or_else(|e| panic!("{e}"));
        let read = |text: &[u8]| {
            std::fs::write(file.path(), text).unwrap_or_else(|e| panic!("{e}"));
            Elf::read(file.path())
        };
        assert!(matches!(read(b""), Err(ElfError::NotElf { .. })));
        assert!(matches!(read(b"#!/bin/sh\n"), Err(ElfError::NotElf { .. })));
        assert!(matches!(read(b"\x7fELF"), Err(ElfError::Damaged { .. })));
        assert!(matches!(Elf::read(Path::new("/no/such/file")), Err(ElfError::Read { .. })));
        // Cut anywhere, it is damaged or has less in it.
        let own = std::fs::read("/proc/self/exe").unwrap_or_else(|e| panic!("{e}"));
        for end in (0..512).chain([4096, own.len() / 2, own.len() - 1]) {
            let _ = read(&own[..end]);
        }
    }
}
