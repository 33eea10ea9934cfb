//! Errors of RDMA devices, with what to do about them.

use super::device::Unavailable;
use crate::session::carrier::Broken;
use std::io::Error;

/// Why a device, or a connection of it, cannot be used.
#[derive(Debug)]
pub enum VerbsError {
    /// No RDMA device can be used.
    Unavailable(Unavailable),
    /// The device's port or its identifier cannot be used, for this reason.
    Unusable(String),
    /// There is no device of this name; the list has the names of the others.
    NoSuchDevice(String, Vec<String>),
    /// No device of this machine has this address.
    NoDeviceAt(std::net::IpAddr, Vec<String>),
    /// The packet size was not accepted: the wanted size and that of the port, in bytes.
    Mtu(u32, u32),
    /// The device lacks 8-byte atomics: its name.
    NoAtomics(String),
    /// The system or the device refuses this step.
    Create(&'static str, Error),
    /// Memory cannot be registered.
    Register {
        /// Number of bytes.
        bytes: usize,
        /// The system's error.
        error: Error,
        /// The process's limit of locked memory in bytes; `None` if there is no limit.
        limit: Option<u64>,
    },
    /// The node cannot be reached over TCP for the set-up.
    Dial(Error),
    /// The peer is not a farside node with RDMA, or of another release: the reason.
    Foreign(String),
    /// The node refuses the connection, for this reason.
    Refused(String),
    /// The connection is unusable, for this reason.
    Lost(&'static str),
}

impl VerbsError {
    /// The system's last error, as the failure of a step.
    pub(crate) fn create(doing: &'static str) -> VerbsError {
        VerbsError::Create(doing, Error::last_os_error())
    }
}

impl std::fmt::Display for VerbsError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let list = |names: &[String]| match names {
            [] => "there is none".to_owned(),
            names => format!("there is {}", names.join(", ")),
        };
        match self {
            VerbsError::Unavailable(error) => error.fmt(f),
            VerbsError::Unusable(reason) => f.write_str(reason),
            VerbsError::NoSuchDevice(name, others) => {
                write!(f, "this machine has no RDMA device '{name}': {}", list(others))
            }
            VerbsError::NoDeviceAt(address, others) => write!(
                f,
                "no RDMA device of this machine has the address {address}, over which the node is reached: name the \
                 device with '?device=NAME'; {}",
                list(others)
            ),
            VerbsError::Mtu(wanted, has) => write!(
                f,
                "packets of {wanted} bytes are not possible here: give 256, 512, 1024, 2048 or 4096, and at most \
                 {has}, the port's active MTU"
            ),
            VerbsError::NoAtomics(name) => write!(
                f,
                "the RDMA device '{name}' has no 8-byte atomics: leave out --nic-atomics, so that engines execute them"
            ),
            VerbsError::Create(doing, error) => write!(f, "RDMA: cannot {doing}: {error}"),
            VerbsError::Register { bytes, error, limit: Some(limit) } => write!(
                f,
                "cannot register {bytes} bytes of memory with the RDMA device: {error}; this process may lock {} KiB \
                 ('ulimit -l'): raise the limit in /etc/security/limits.conf (memlock), or LimitMEMLOCK= of the \
                 service",
                limit / 1024
            ),
            VerbsError::Register { bytes, error, limit: None } => write!(
                f,
                "cannot register {bytes} bytes of memory with the RDMA device: {error}; the memory that a process may \
                 lock is not limited here, so the machine has too little free memory, or the device has no more \
                 registrations"
            ),
            VerbsError::Dial(error) => error.fmt(f),
            VerbsError::Foreign(reason) => {
                write!(f, "the peer does not serve verbs ({reason}): use the same release on both sides")
            }
            VerbsError::Refused(reason) => f.write_str(reason),
            VerbsError::Lost(reason) => write!(f, "the RDMA connection is broken: {reason}"),
        }
    }
}

impl std::error::Error for VerbsError {}

impl From<Unavailable> for VerbsError {
    fn from(error: Unavailable) -> VerbsError {
        VerbsError::Unavailable(error)
    }
}

impl From<VerbsError> for Broken {
    fn from(error: VerbsError) -> Broken {
        Broken(error.to_string())
    }
}
