//! The Unix socket of a node: how it is created, and which errors can prevent that.
//!
//! Invariant: the socket of a live node is never removed.
//! Invariant: a dead node's socket is removed by the next node, under a lock, so that no two nodes remove it
//! concurrently.

use crate::shm::NAME_MAX;
use crate::shm::peer::peer;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Maximum number of clients waiting to be accepted.
const BACKLOG: i32 = 128;

/// Why no node can listen at the path. The failed attempt leaves no file.
#[derive(Debug)]
pub enum ListenError {
    /// Another node already listens at this path. The number is that node's process id, if known.
    Served(PathBuf, Option<u32>),
    /// A file that is not a node's socket has this path.
    InTheWay(PathBuf),
    /// The path is not a valid socket name.
    Name(PathBuf),
    /// A system call failed: the attempted operation, the socket's path, and the system's error.
    System(&'static str, PathBuf, std::io::Error),
}

impl std::fmt::Display for ListenError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ListenError::Served(_, Some(pid)) => {
                write!(f, "a node (pid {pid}) already listens there: use it, or stop it")
            }
            ListenError::Served(_, None) => f.write_str("a node already listens there: use it, or stop it"),
            ListenError::InTheWay(_) => f.write_str("the file exists and is not a node's socket: remove it"),
            ListenError::Name(path) => write!(
                f,
                "the path has {} bytes, and at most {NAME_MAX} are allowed: shorten it",
                path.as_os_str().len()
            ),
            ListenError::System(doing, _, error) => write!(f, "could not {doing} it: {error}"),
        }
    }
}

impl std::error::Error for ListenError {}

/// A SEQPACKET socket that only the node's own user may connect to. Dropping it removes its file.
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// Device and inode of the socket's file. They show whether another node has bound the path since.
    file: (u64, u64),
}

impl Listener {
    /// Creates the socket, replacing one that a dead node left behind. Waits at most about 1 s.
    ///
    /// # Errors
    /// [`ListenError`] says why no node can listen at the path.
    pub fn bind(path: &Path) -> Result<Listener, ListenError> {
        let path = path.to_owned();
        let refused = |doing, path: &Path| {
            let path = path.to_owned();
            move |errno: rustix::io::Errno| ListenError::System(doing, path, errno.into())
        };
        let address = SocketAddrUnix::new(&path).map_err(|errno| match errno {
            rustix::io::Errno::NAMETOOLONG => ListenError::Name(path.clone()),
            errno => refused("use the name", &path)(errno),
        })?;
        let _alone = lock_folder_of(&path);
        clear_stale(&path, &address)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(refused("make a socket for", &path))?;
        rustix::net::bind(&socket, &address).map_err(refused("bind", &path))?;
        let file = std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))
            .and_then(|()| file_of(&path))
            .map_err(|error| ListenError::System("protect", path.clone(), error))?;
        rustix::net::listen(&socket, BACKLOG).map_err(refused("listen at", &path))?;
        Ok(Listener { socket, path, file })
    }

    /// Accepts the next connection.
    ///
    /// # Errors
    /// The system's error; `AGAIN` if no client is waiting.
    pub fn accept(&self) -> rustix::io::Result<OwnedFd> {
        rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Another node may have bound the path since. If the removal fails, the next node removes the file.
        if file_of(&self.path).is_ok_and(|file| file == self.file) {
            let _removed_already = std::fs::remove_file(&self.path);
        }
    }
}

fn file_of(path: &Path) -> std::io::Result<(u64, u64)> {
    std::fs::symlink_metadata(path).map(|found| (found.dev(), found.ino()))
}

/// Locks the socket's folder until the result is dropped, so that no other node creates a socket in it. Without the
/// lock, two nodes that find the same stale socket could each remove the other's new one. Returns `None`, and the
/// caller continues without the lock, in two cases: another process holds the lock for more than 1 s, or the folder
/// cannot be opened. In the second case the caller's attempt to create the socket fails and reports the reason.
fn lock_folder_of(path: &Path) -> Option<OwnedFd> {
    use rustix::fs::{FlockOperation, Mode, OFlags};
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(folder, flags, Mode::empty()).ok()?;
    for _ in 0..100 {
        if rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive).is_ok() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Some(folder)
}

fn clear_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), ListenError> {
    // If the file cannot be inspected, it is absent, or the later attempt to create the socket fails and reports the
    // reason.
    let Ok(found) = std::fs::symlink_metadata(path) else { return Ok(()) };
    if !found.file_type().is_socket() {
        return Err(ListenError::InTheWay(path.to_owned()));
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let system = |doing, error: std::io::Error| ListenError::System(doing, path.to_owned(), error);
    let probe = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|errno| system("make a socket for", errno.into()))?;
    use rustix::io::Errno;
    match rustix::net::connect(&probe, address) {
        Ok(()) => {
            // The pid only helps the user to find the node's process, so it may be missing.
            let pid = peer(&probe).ok().and_then(|peer| peer.pid);
            let pid = pid.map(|pid| pid.as_raw_nonzero().get() as u32);
            Err(ListenError::Served(path.to_owned(), pid))
        }
        // The node's backlog is full.
        Err(Errno::AGAIN) => Err(ListenError::Served(path.to_owned(), None)),
        Err(Errno::CONNREFUSED) => {
            std::fs::remove_file(path).map_err(|error| system("remove the socket of a dead node at", error))
        }
        Err(Errno::NOENT) => Ok(()), // Removed in the meantime.
        Err(Errno::PROTOTYPE) => Err(ListenError::InTheWay(path.to_owned())),
        Err(errno) => Err(system("connect to the node at", errno.into())),
    }
}
