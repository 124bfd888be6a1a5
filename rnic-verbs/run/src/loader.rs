//! Which files the program loader would take (`ld.so(8)`), found out without running anything.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::{Path, PathBuf};

use crate::elf::{Elf, Target};

/// The loader's search, as it will be with our folder in front of `LD_LIBRARY_PATH`.
#[derive(Debug)]
pub struct Loader {
    target: Target,
    /// `LD_LIBRARY_PATH`.
    path: Vec<PathBuf>,
    /// `/etc/ld.so.cache`: files by name.
    cache: HashMap<String, Vec<PathBuf>>,
}

/// A file that is loaded.
#[derive(Debug)]
pub struct Loaded {
    /// The file.
    pub path: PathBuf,
    /// What is in it.
    pub elf: Elf,
    /// The `DT_RPATH` by which it was found, and whose that is.
    pub by_rpath: Option<(String, PathBuf)>,
}

/// Everything that is loaded with a program.
#[derive(Debug, Default)]
pub struct Closure {
    /// Libraries by the names under which they are needed.
    pub libraries: BTreeMap<String, Loaded>,
    /// Names that nothing was found for, and who needs them.
    pub missing: Vec<(String, PathBuf)>,
}

/// Folders of a `DT_RPATH`, and whose that is.
#[derive(Clone)]
struct Rpath {
    text: String,
    owner: PathBuf,
    folders: Vec<PathBuf>,
}

impl Loader {
    /// A search for libraries of this machine.
    pub fn new(target: Target, path: &std::ffi::OsStr) -> Self {
        let cache = std::fs::read("/etc/ld.so.cache").unwrap_or_default();
        let path = std::env::split_paths(path).collect();
        Loader { target, path, cache: entries(&cache).unwrap_or_default() }
    }

    /// What is loaded with `program`, breadth first as the loader does it: each name once, for
    /// whoever needs it first.
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

    /// Queues what a file needs, with the paths that count for it. A `DT_RPATH` counts for the
    /// libraries of libraries as well, unless who needs one has a `DT_RUNPATH`.
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
        let by_rpath = rpaths.iter().flat_map(|rpath| {
            rpath.folders.iter().map(move |folder| (folder.join(name), Some(rpath)))
        });
        let by_path = self.path.iter().chain(runpath).map(|folder| (folder.join(name), None));
        let cached = self.cache.get(name).into_iter().flatten().map(|path| (path.clone(), None));
        let usual = USUAL.iter().map(|folder| (Path::new(folder).join(name), None));
        let mut all = by_rpath.chain(by_path).chain(cached).chain(usual);
        all.find_map(|(path, rpath)| self.load(&path, rpath))
    }

    /// Reads a file if it is a library for this machine; the loader passes over others.
    fn load(&self, path: &Path, rpath: Option<&Rpath>) -> Option<Loaded> {
        let elf = path.exists().then(|| Elf::read(path).ok()).flatten()?;
        let by_rpath = rpath.map(|rpath| (rpath.text.clone(), rpath.owner.clone()));
        (elf.target == self.target).then(|| Loaded { path: path.to_owned(), elf, by_rpath })
    }
}

/// The folders of a list in which `$ORIGIN` is the folder of the file with the list.
fn folders(list: &str, origin: &Path) -> Vec<PathBuf> {
    let origin = origin.to_string_lossy();
    let spelled = list.replace("${ORIGIN}", &origin).replace("$ORIGIN", &origin);
    spelled.split(':').filter(|folder| !folder.is_empty()).map(PathBuf::from).collect()
}

/// The files of the loader's cache by name, in their order; none if it is not as glibc writes it.
fn entries(cache: &[u8]) -> Option<HashMap<String, Vec<PathBuf>>> {
    // An older format may stand before this one, whose offsets count from its own begin.
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
        let (name, path) = (text(number(entry + 4)?)?, text(number(entry + 8)?)?);
        found.entry(name).or_default().push(path.into());
    }
    Some(found)
}

/// Begin of the cache's part that is in use since glibc 2.2.
const CACHE_MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
/// Bytes before its first entry.
const CACHE_HEADER: usize = 48;
/// Bytes of an entry: flags, name, path, and what the machine must be able to do.
const CACHE_ENTRY: usize = 24;
/// Where libraries are that no cache names.
const USUAL: [&str; 4] = ["/lib64", "/usr/lib64", "/lib", "/usr/lib"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_this_test_needs_is_found_where_the_loader_found_it() {
        let exe = Path::new("/proc/self/exe");
        let own = Elf::read(exe).unwrap_or_else(|e| panic!("{e}"));
        let loader = Loader::new(own.target, std::ffi::OsStr::new(""));
        let closure = loader.closure(exe, &own);
        assert_eq!(closure.missing, []);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_else(|e| panic!("{e}"));
        let libc = closure.libraries.get("libc.so.6").map(|libc| libc.path.canonicalize());
        let libc = libc.and_then(Result::ok).unwrap_or_else(|| panic!("{closure:?}"));
        assert!(maps.contains(&*libc.to_string_lossy()), "{libc:?}\n{maps}");
    }

    #[test]
    fn a_cache_that_is_cut_is_as_good_as_none() {
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
