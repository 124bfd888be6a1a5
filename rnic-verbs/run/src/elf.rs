//! Reads the parts of an ELF file that the dynamic loader uses: target machine, interpreter, needed
//! libraries and symbols.

use std::collections::HashSet;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use object::Endianness;
use object::elf::{self, FileHeader32, FileHeader64};
use object::read::elf::{FileHeader, ProgramHeader, SectionTable, Sym};
use object::read::{ReadCache, ReadRef};

/// Reason why a file is not a program or a library.
#[derive(Debug, thiserror::Error)]
pub enum ElfError {
    /// The file cannot be read.
    #[error("{} cannot be read: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// The file is not ELF.
    #[error("{} is not an ELF file", path.display())]
    NotElf {
        /// The file.
        path: PathBuf,
    },
    /// The file is invalid.
    #[error("{} is damaged: {error}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The parser's error.
        error: object::read::Error,
    },
}

/// A program or a library.
#[derive(Debug)]
pub struct Elf {
    /// Target machine.
    pub target: Target,
    /// Its dynamic loader; `None` for libraries and static programs.
    pub interpreter: Option<PathBuf>,
    /// Names of needed libraries (`DT_NEEDED`).
    pub needed: Vec<String>,
    /// `DT_RPATH`: first search path for its libraries and for the libraries that those need.
    pub rpath: Option<String>,
    /// `DT_RUNPATH`: search path for its libraries after `LD_LIBRARY_PATH`.
    pub runpath: Option<String>,
    /// Undefined symbols.
    pub imports: Vec<Import>,
    /// Names of defined symbols with their versions.
    pub exports: HashSet<(String, Option<String>)>,
}

/// Target machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// `e_machine`.
    pub machine: elf::Machine,
    /// True for 64 bits, false for 32.
    pub wide: bool,
    /// True if the most significant byte comes first.
    pub big_endian: bool,
}

/// An undefined symbol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Import {
    /// Name of the symbol.
    pub name: String,
    /// Version at link time.
    pub version: Option<String>,
    /// SONAME of the library that defined it at link time.
    pub library: Option<String>,
    /// True if the symbol may be missing at run time.
    pub weak: bool,
}

impl Elf {
    /// Reads only the parts of a file that the loader uses, because programs can be gigabytes long.
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

    /// Returns true if the file is a dynamic loader (ld.so(8)), which exports a symbol for
    /// debuggers.
    pub fn is_loader(&self) -> bool {
        self.interpreter.is_none() && self.exports.iter().any(|(name, _)| name == "_r_debug")
    }

    /// Returns the target machine of this process's own program.
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

/// Sorts the dynamic symbols into imports and exports.
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
        let library = version.and_then(|version| version.file()).map(text);
        let version = version.map(|version| text(version.name()));
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

/// Length of `e_ident`, the identification at the start of a file, in bytes.
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
    fn other_files_are_not_elf() {
        let file = tempfile::NamedTempFile::new().unwrap_or_else(|e| panic!("{e}"));
        let read = |text: &[u8]| {
            std::fs::write(file.path(), text).unwrap_or_else(|e| panic!("{e}"));
            Elf::read(file.path())
        };
        assert!(matches!(read(b""), Err(ElfError::NotElf { .. })));
        assert!(matches!(read(b"#!/bin/sh\n"), Err(ElfError::NotElf { .. })));
        assert!(matches!(read(b"\x7fELF"), Err(ElfError::Damaged { .. })));
        assert!(matches!(Elf::read(Path::new("/no/such/file")), Err(ElfError::Read { .. })));
        // A truncated file is damaged or incomplete.
        let own = std::fs::read("/proc/self/exe").unwrap_or_else(|e| panic!("{e}"));
        for end in (0..512).chain([4096, own.len() / 2, own.len() - 1]) {
            let _ = read(&own[..end]);
        }
    }
}
