//! The process at the other end of a Unix socket.
//!
//! This module exists because in `rustix` a process id is never 0, but the system reports 0 for a process in a pid
//! namespace that this process does not see.

use rustix::process::Pid;
use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd};

/// Credentials of the process at the other end of a socket, as of the time when it connected or began to listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Process id, or `None` if the process is in a pid namespace that this process does not see.
    pub pid: Option<Pid>,
    /// Effective user id of the process.
    pub user: u32,
}

/// Returns the process at the other end of a connected socket.
///
/// # Errors
/// The system's error: the credentials cannot be read.
pub fn peer(socket: &impl AsFd) -> rustix::io::Result<Peer> {
    let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let socket: c_int = socket.as_fd().as_raw_fd();
    // SAFETY: the descriptor is borrowed until this returns. The system writes at most `len` bytes to `found`, which
    // has that size and is valid with any content.
    let failed = unsafe {
        libc::getsockopt(
            socket,
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            std::ptr::from_mut(&mut found).cast(),
            &mut len,
        )
    };
    if failed != 0 {
        let error = std::io::Error::last_os_error();
        return Err(rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::IO));
    }
    Ok(Peer { pid: seen(found.pid), user: found.uid })
}

fn seen(pid: libc::pid_t) -> Option<Pid> {
    (pid > 0).then(|| Pid::from_raw(pid)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_its_own_peer() {
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().expect("two sockets");
        let found = peer(&ours).expect("a connected socket");
        assert_eq!(found.pid, Some(rustix::process::getpid()));
        assert_eq!(found.user, rustix::process::geteuid().as_raw());
        assert!(peer(&std::fs::File::open("/dev/null").expect("a device")).is_err());
    }

    #[test]
    fn a_pid_below_1_means_an_unseen_process() {
        assert_eq!([seen(0), seen(-1), seen(1)], [None, None, Some(Pid::INIT)]);
    }
}
