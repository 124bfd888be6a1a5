//! Maps paths of the kernel's RDMA devices to paths in the daemon's tree.

use std::mem::MaybeUninit;

use libc::{AT_FDCWD, c_char, c_int};

use crate::bytes::Bytes;
use crate::errno::kept;
use crate::kernel_path;
use crate::place::{Name, Place, Position};
use crate::tree::{self, View};

/// Maximum length of a mapped path including its zero byte. Longer paths are passed on unchanged.
pub(crate) const ROOM: usize = libc::PATH_MAX as usize;

/// Calls `call` with the path, or with its counterpart in the tree. The path may be any pointer: an
/// unreadable pointer is passed on, and the C library and the kernel reject it. A relative path
/// starts at `folder`.
pub(crate) fn mapped<T>(
    folder: c_int,
    path: *const c_char,
    call: impl FnOnce(*const c_char) -> T,
) -> T {
    match Counterpart::of(folder, path) {
        Some(counterpart) => replaced(&counterpart, path, call),
        None => call(path),
    }
}

/// Calls `call` with the text of the counterpart, or with the path if the counterpart is too long.
/// A separate function, so that calls with other paths do not need stack for its buffer, which a
/// signal handler may lack.
#[inline(never)]
fn replaced<T>(
    counterpart: &Counterpart,
    path: *const c_char,
    call: impl FnOnce(*const c_char) -> T,
) -> T {
    let mut whole = [const { MaybeUninit::<u8>::uninit() }; ROOM];
    match counterpart.write(&mut whole) {
        Some(()) => call(whole.as_ptr().cast()),
        None => call(path),
    }
}

/// Returns true if the first component of a path leads upwards, or towards the tree from one of the
/// folders above it.
fn may_be_mapped(path: *const c_char) -> bool {
    let mut components = Components::of(path);
    let is_absolute = components.is_absolute();
    loop {
        let Some(Component::Part(_, Some(name))) = components.next() else { return false };
        match name.bytes() {
            b"." => {}
            b".." => return true,
            _ if is_absolute => return Place::Root.entry(&name).is_some(),
            _ => return Place::FOLDERS.iter().any(|folder| folder.entry(&name).is_some()),
        }
    }
}

/// The path in the tree, or out of it, to which a path of the program is mapped.
struct Counterpart {
    root: &'static [u8],
    place: Place,
    /// The part of the program's path after the place.
    rest: *const c_char,
}

impl Counterpart {
    /// Returns the counterpart of a path; `None` if it has none.
    #[inline(never)]
    fn of(folder: c_int, path: *const c_char) -> Option<Self> {
        if !may_be_mapped(path) {
            return None;
        }
        let root = tree::root()?;
        let mut components = Components::of(path);
        let mut position =
            if components.is_absolute() { Position::root() } else { position_of(folder, root)? };
        let was_in_tree = position.place.is_in_tree();
        let rest = loop {
            match components.next()? {
                Component::Part(_, name) if position.follow(name.as_ref()) => {}
                Component::Part(start, _) | Component::End(start) => break start,
            }
        };
        let Position { place, below, has_left } = position;
        // A path that reaches no entry of the tree has no counterpart, and neither has a path that
        // stays in the tree.
        let enters = place.is_in_tree() && !was_in_tree;
        (below == 0 && (enters || has_left)).then_some(Counterpart { root, place, rest })
    }

    /// Writes the path with its zero byte. Returns `None` if it is too long.
    fn write(&self, whole: &mut [MaybeUninit<u8>; ROOM]) -> Option<()> {
        let place = &self.place;
        let mut text = Text { whole, length: 0 };
        if place.is_in_tree() {
            text.push(self.root)?;
            let view = View::of_program().filter(|_| !matches!(place, Place::TreeDevices));
            if let Some(view) = view {
                text.push_view(&view)?;
            }
        }
        text.push(place.path())?;
        if let Place::TreeClass(name) = place {
            text.push(name.bytes())?;
        }
        text.push(b"/")?;
        let mut bytes = Bytes::of(self.rest);
        loop {
            let byte = bytes.next()?;
            text.push(&[byte])?;
            if byte == 0 {
                return Some(());
            }
        }
    }
}

/// Returns the position of an open folder, or of the working directory (`AT_FDCWD`). A separate
/// function, because only relative paths that may be mapped need its buffer.
#[inline(never)]
fn position_of(folder: c_int, root: &[u8]) -> Option<Position> {
    let mut buffer = [0u8; ROOM];
    let length = kept(|| link_of(folder, &mut buffer))?;
    let text = &buffer[..length];
    let (start, rest) = kernel_path::of(text, root).unwrap_or((b"", text));
    let mut position = Position::root();
    for part in [start, rest] {
        for name in part.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
            position.descend(name);
        }
    }
    Some(position)
}

/// Reads the path of a folder. Returns its length; `None` if it is not known.
fn link_of(folder: c_int, buffer: &mut [u8]) -> Option<usize> {
    let mut link = [0u8; 40];
    let mut text = [0u8; 10];
    let (start, number): (&[u8], &[u8]) = match folder {
        AT_FDCWD => (b"/proc/thread-self/cwd", b""),
        0.. => (b"/proc/thread-self/fd/", digits(folder.unsigned_abs(), &mut text)),
        _ => return None,
    };
    link[..start.len()].copy_from_slice(start);
    link[start.len()..start.len() + number.len()].copy_from_slice(number);
    // SAFETY: the path ends in a zero byte, because the array is longer, and the buffer has the
    // passed length. The system call avoids the functions of this library.
    let length = unsafe {
        let path = link.as_ptr();
        libc::syscall(libc::SYS_readlinkat, AT_FDCWD, path, buffer.as_mut_ptr(), buffer.len())
    };
    usize::try_from(length).ok().filter(|length| *length < buffer.len())
}

fn digits(mut number: u32, text: &mut [u8; 10]) -> &[u8] {
    let mut at = text.len();
    loop {
        at -= 1;
        text[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            return &text[at..];
        }
    }
}

/// Text in a buffer.
struct Text<'a> {
    whole: &'a mut [MaybeUninit<u8>; ROOM],
    length: usize,
}

impl Text<'_> {
    fn push(&mut self, bytes: &[u8]) -> Option<()> {
        let to = self.whole.get_mut(self.length..)?.get_mut(..bytes.len())?;
        for (to, byte) in to.iter_mut().zip(bytes) {
            to.write(*byte);
        }
        self.length += bytes.len();
        Some(())
    }

    /// Appends the folder of a view. If there is no view for this set of devices, appends nothing,
    /// so that the path is in the whole tree.
    fn push_view(&mut self, view: &View) -> Option<()> {
        let root = self.length;
        let mut names = 0;
        for name in view.names() {
            self.push(if names == 0 { tree::VIEWS } else { b"," })?;
            self.push(name)?;
            names += 1;
        }
        if names > 1 {
            let end = self.length;
            self.push(b"\0")?;
            self.length = if kept(|| exists(self.whole)) { end } else { root };
        }
        Some(())
    }
}

/// Returns true if there is a file of this path, which must end in a zero byte.
fn exists(path: &[MaybeUninit<u8>; ROOM]) -> bool {
    // SAFETY: the path ends in a zero byte. The system call avoids the functions of this library.
    unsafe { libc::syscall(libc::SYS_faccessat, AT_FDCWD, path.as_ptr(), libc::F_OK) == 0 }
}

/// A component of a path.
enum Component {
    /// Its first byte, and its text unless it is longer than the name of any entry.
    Part(*const c_char, Option<Name>),
    /// The zero byte at the end of the path.
    End(*const c_char),
}

/// The components of a path.
struct Components {
    bytes: Bytes,
}

impl Components {
    fn of(path: *const c_char) -> Self {
        Components { bytes: Bytes::of(path) }
    }

    fn is_absolute(&mut self) -> bool {
        self.bytes.peek() == Some(b'/')
    }

    /// Returns the next component; `None` at an unreadable byte. The end of the path is the last
    /// component. No component follows a component without text.
    fn next(&mut self) -> Option<Component> {
        while self.bytes.peek()? == b'/' {
            self.bytes.next()?;
        }
        let start = self.bytes.position();
        if self.bytes.peek()? == 0 {
            return Some(Component::End(start));
        }
        let mut name = Name::default();
        loop {
            match self.bytes.peek()? {
                0 | b'/' => return Some(Component::Part(start, Some(name))),
                byte if name.push(byte).is_none() => return Some(Component::Part(start, None)),
                _ => self.bytes.next()?,
            };
        }
    }
}
