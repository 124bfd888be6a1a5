//! Predicts the files that the dynamic loader would load (`ld.so(8)`), without running anything.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::{Path, PathBuf};

use crate::elf::{Elf, Target};

/// A simulation of the loader's search, with rnicd's directory first in `LD_LIBRARY_PATH` and its
/// libraries in `LD_PRELOAD`.
#[derive(Debug)]
pub struct Loader {
    target: Target,
    /// Libraries in `LD_PRELOAD`, whose file names are their SONAMEs.
    preloaded: Vec<PathBuf>,
    /// `LD_LIBRARY_PATH`.
    path: Vec<PathBuf>,
    /// Files in `/etc/ld.so.cache`, by name.
    cache: HashMap<String, Vec<PathBuf>>,
}

/// A file that the loader would load.
#[derive(Debug)]
pub struct Loaded {
    /// Path of the file.
    pub path: PathBuf,
    /// Contents of the file.
    pub elf: Elf,
    /// The `DT_RPATH` through which it was found, and the file that contains it.
    pub by_rpath: Option<(String, PathBuf)>,
}

/// All libraries that are loaded with a program.
#[derive(Debug, Default)]
pub struct Closure {
    /// Libraries, by the names under which other files need them.
    pub libraries: BTreeMap<String, Loaded>,
    /// Names of missing libraries, and the files that need them.
    pub missing: Vec<(String, PathBuf)>,
}

/// Directories of a `DT_RPATH`, and the file that contains it.
#[derive(Clone)]
struct Rpath {
    text: String,
    owner: PathBuf,
    folders: Vec<PathBuf>,
}

impl Loader {
    /// Creates a search for libraries of this target machine. `path` is `LD_LIBRARY_PATH`, and the
    /// `preloaded` libraries have their SONAMEs as file names.
    pub fn new(target: Target, path: &std::ffi::OsStr, preloaded: Vec<PathBuf>) -> Self {
        let cache = std::fs::read("/etc/ld.so.cache").unwrap_or_default();
        let path = std::env::split_paths(path).collect();
        Loader { target, preloaded, path, cache: entries(&cache).unwrap_or_default() }
    }

    /// Returns all libraries loaded with `program`. Searches breadth first as the loader does, and
    /// once per name, with the search paths of the first file that needs it.
    pub fn closure(&self, path: &Path, program: &Elf) -> Closure {
        let mut closure = Closure::default();
        let mut waiting = VecDeque::new();
        self.needs(path, program, &[], &mut waiting);
        while let Some((name, by, rpaths, runpath)) = waiting.pop_front() {
            if closure.libraries.contains_key(&name)
                || closure.missing.iter().any(|(missing, _)| *missing == name)
            {
                continue;
            }
            match self.find(&name, &rpaths, &runpath) {
                Some(loaded) => {
                    self.needs(&loaded.path, &loaded.elf, &rpaths, &mut waiting);
                    closure.libraries.insert(name, loaded);
                }
                None => closure.missing.push((name, by)),
            }
        }
        closure
    }

    /// Queues the libraries that a file needs, with their search paths. A `DT_RPATH` also applies
    /// to indirectly needed libraries, unless the file that needs them has a `DT_RUNPATH`.
    fn needs(
        &self,
        path: &Path,
        elf: &Elf,
        inherited: &[Rpath],
        waiting: &mut VecDeque<(String, PathBuf, Vec<Rpath>, Vec<PathBuf>)>,
    ) {
        let folder = path.parent().unwrap_or(Path::new("/"));
        let runpath = elf.runpath.as_deref().map(|text| folders(text, folder));
        let own = elf.rpath.as_ref().map(|text| Rpath {
            text: text.clone(),
            owner: path.to_owned(),
            folders: folders(text, folder),
        });
        let rpaths: Vec<Rpath> = match runpath {
            Some(_) => Vec::new(),
            None => own.into_iter().chain(inherited.iter().cloned()).collect(),
        };
        let runpath = runpath.unwrap_or_default();
        for name in &elf.needed {
            waiting.push_back((name.clone(), path.to_owned(), rpaths.clone(), runpath.clone()));
        }
    }

    fn find(&self, name: &str, rpaths: &[Rpath], runpath: &[PathBuf]) -> Option<Loaded> {
        if name.contains('/') {
            return self.load(Path::new(name), None);
        }
        // A preloaded library is already loaded, so the loader does not search for it.
        let mut preloaded = self.preloaded.iter().filter(|path| path.ends_with(name));
        if let Some(loaded) = preloaded.find_map(|path| self.load(path, None)) {
            return Some(loaded);
        }
        let by_rpath = rpaths.iter().flat_map(|rpath| {
            rpath.folders.iter().map(move |folder| (folder.join(name), Some(rpath)))
        });
        let by_path = self.path.iter().chain(runpath).map(|folder| (folder.join(name), None));
        let cached = self.cache.get(name).into_iter().flatten().map(|path| (path.clone(), None));
        let usual = DEFAULT_FOLDERS.iter().map(|folder| (Path::new(folder).join(name), None));
        let mut all = by_rpath.chain(by_path).chain(cached).chain(usual);
        all.find_map(|(path, rpath)| self.load(&path, rpath))
    }

    /// Reads a file if it is a library for this target machine. The loader ignores other files.
    fn load(&self, path: &Path, rpath: Option<&Rpath>) -> Option<Loaded> {
        let elf = path.exists().then(|| Elf::read(path).ok()).flatten()?;
        let by_rpath = rpath.map(|rpath| (rpath.text.clone(), rpath.owner.clone()));
        (elf.target == self.target).then(|| Loaded { path: path.to_owned(), elf, by_rpath })
    }
}

/// Returns the directories of a search path. `$ORIGIN` is the directory of the file that contains
/// it.
fn folders(list: &str, origin: &Path) -> Vec<PathBuf> {
    let origin = origin.to_string_lossy();
    let spelled = list.replace("${ORIGIN}", &origin).replace("$ORIGIN", &origin);
    spelled.split(':').filter(|folder| !folder.is_empty()).map(PathBuf::from).collect()
}

/// Parses the loader's cache into files by name, in order. Returns `None` if it is not in glibc's
/// format.
fn entries(cache: &[u8]) -> Option<HashMap<String, Vec<PathBuf>>> {
    // A cache in an older format may precede. Offsets count from the start of the newer cache.
    let start = cache.windows(CACHE_MAGIC.len()).position(|bytes| bytes == CACHE_MAGIC)?;
    let cache = &cache[start..];
    let number = |at: usize| -> Option<usize> {
        let bytes = cache.get(at..at.checked_add(4)?)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?) as usize)
    };
    let text = |at: usize| {
        let bytes = cache.get(at..)?;
        let end = bytes.iter().position(|byte| *byte == 0)?;
        Some(String::from_utf8_lossy(&bytes[..end]).into_owned())
    };
    let mut found: HashMap<String, Vec<PathBuf>> = HashMap::new();
    for n in 0..number(CACHE_MAGIC.len())? {
        let entry = CACHE_HEADER + n * CACHE_ENTRY;
        let name = text(number(entry + 4)?)?;
        let path = text(number(entry + 8)?)?;
        found.entry(name).or_default().push(path.into());
    }
    Some(found)
}

/// Magic of the cache format since glibc 2.2.
const CACHE_MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
/// Length of the header before the first entry, in bytes.
const CACHE_HEADER: usize = 48;
/// Length of an entry in bytes: flags, name, path, and the required hardware capabilities.
const CACHE_ENTRY: usize = 24;
/// Default directories, which the loader searches after the cache.
const DEFAULT_FOLDERS: [&str; 4] = ["/lib64", "/usr/lib64", "/lib", "/usr/lib"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closure_matches_the_real_loader() {
        let exe = Path::new("/proc/self/exe");
        let own = Elf::read(exe).unwrap_or_else(|e| panic!("{e}"));
        let loader = Loader::new(own.target, std::ffi::OsStr::new(""), Vec::new());
        let closure = loader.closure(exe, &own);
        assert_eq!(closure.missing, []);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_else(|e| panic!("{e}"));
        let libc = closure.libraries.get("libc.so.6").map(|libc| libc.path.canonicalize());
        let libc = libc.and_then(Result::ok).unwrap_or_else(|| panic!("{closure:?}"));
        assert!(maps.contains(&*libc.to_string_lossy()), "{libc:?}\n{maps}");
    }

    #[test]
    fn truncated_cache_is_ignored() {
        let mut cache = [CACHE_MAGIC, &1u32.to_le_bytes(), &[0; 24]].concat();
        let strings = (CACHE_HEADER + CACHE_ENTRY) as u32;
        for word in [0u32, strings, strings + 4, 0, 0, 0] {
            cache.extend(word.to_le_bytes());
        }
        cache.extend(b"a.1\0/x/a.1\0");
        let found = entries(&cache).expect("a cache");
        assert_eq!(found.get("a.1"), Some(&vec![PathBuf::from("/x/a.1")]));
        assert!((0..cache.len()).all(|end| entries(&cache[..end]).is_none()));
        let after_another = [b"ld.so-1.7.0\0\0\0\0\0".as_slice(), &cache].concat();
        assert_eq!(entries(&after_another), Some(found));
    }

    #[test]
    fn origin_is_the_folder_of_the_file() {
        let found = folders("$ORIGIN/../lib:${ORIGIN}::/x", Path::new("/a/b"));
        assert_eq!(found, ["/a/b/../lib", "/a/b", "/x"].map(PathBuf::from));
    }
}
