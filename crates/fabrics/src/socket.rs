//! The unix socket at which a node is found: how it is made, and what may be in its way.
//!
//! Invariant: the socket of a node that lives is never taken away. Invariant: what a node leaves behind when it dies
//! is cleared away by the next one, and by nobody while two look at it.

use crate::shm::NAME_MAX;
use crate::shm::peer::peer;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Those who wait to be let in.
const BACKLOG: i32 = 128;

/// Why nobody can be served there. Nothing is left behind.
#[derive(Debug)]
pub enum ListenError {
    /// Another node serves there, by this process if it is known.
    Served(PathBuf, Option<u32>),
    /// Something that is no node's socket is in the way.
    InTheWay(PathBuf),
    /// No socket can have that name.
    Name(PathBuf),
    /// The system refuses.
    System(&'static str, PathBuf, std::io::Error),
}

impl std::fmt::Display for ListenError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ListenError::Served(_, Some(pid)) => {
                write!(f, "a node, pid {pid}, serves there already: use it, or stop it")
            }
            ListenError::Served(_, None) => f.write_str("a node serves there already: use it, or stop it"),
            ListenError::InTheWay(_) => f.write_str("it exists and is no node's socket: remove it"),
            ListenError::Name(path) => write!(
                f,
                "the name has {} bytes and at most {NAME_MAX} are possible: shorten it",
                path.as_os_str().len()
            ),
            ListenError::System(doing, _, error) => write!(f, "could not {doing} it: {error}"),
        }
    }
}

impl std::error::Error for ListenError {}

/// A SEQPACKET socket that its user alone may connect to. Its file goes when it is dropped.
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// Device and number of the socket's file: another node's may come to stand at the same path.
    file: (u64, u64),
}

impl Listener {
    /// Makes the socket, in place of one that a dead node left behind. Waits about a second at most.
    ///
    /// # Errors
    /// [`ListenError`].
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

    /// The next one who connects.
    ///
    /// # Errors
    /// The system's; `AGAIN` if there is nobody.
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
        // What stands there now, if anything, is another's; what cannot be removed, the next node clears away.
        if file_of(&self.path).is_ok_and(|file| file == self.file) {
            let _removed_already = std::fs::remove_file(&self.path);
        }
    }
}

fn file_of(path: &Path) -> std::io::Result<(u64, u64)> {
    std::fs::symlink_metadata(path).map(|found| (found.dev(), found.ino()))
}

/// Holds off other nodes that make a socket in the same folder, until it is dropped: two that found the same stale
/// one would each remove what they find. Who holds it for too long is not waited for; where the folder cannot be
/// opened, making the socket in it fails and says why.
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
    // What cannot be looked at is not there, or making the socket fails and says why.
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
            // Who it is only helps to find it.
            let pid = peer(&probe).ok().and_then(|peer| peer.pid);
            let pid = pid.map(|pid| pid.as_raw_nonzero().get() as u32);
            Err(ListenError::Served(path.to_owned(), pid))
        }
        // Its backlog is full.
        Err(Errno::AGAIN) => Err(ListenError::Served(path.to_owned(), None)),
        Err(Errno::CONNREFUSED) => {
            std::fs::remove_file(path).map_err(|error| system("remove the socket of a dead node at", error))
        }
        Err(Errno::NOENT) => Ok(()), // It was removed meanwhile.
        Err(Errno::PROTOTYPE) => Err(ListenError::InTheWay(path.to_owned())),
        Err(errno) => Err(system("learn who serves at", errno.into())),
    }
}
