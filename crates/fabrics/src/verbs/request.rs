//! A client's requests to its engine for one-sided access, and the responses. They are calls of
//! [`ServiceId::NIC`](farside_remote::fabric::ServiceId::NIC), as JSON.

use super::resources::End;
use super::setup;
use serde::{Deserialize, Serialize};

/// A request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Connects a queue pair for one-sided requests. It replaces the session's former one.
    Connect(Pair),
    /// Registers the memory of the region that this key of the session opens.
    Register {
        /// Number of the region.
        region: u32,
        /// The secret of the session's key.
        secret: u64,
    },
}

/// A response.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// The node's queue pair.
    Connected(Pair),
    /// The region's memory, in the order of its addresses.
    Registered(Vec<Extent>),
    /// A part of the memory was prepared, since all at once would delay the engine's other clients. The client repeats
    /// its request.
    Pending,
}

/// One end of a connection for one-sided requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pair {
    /// Number of the queue pair.
    pub number: u32,
    /// First packet number that it sends.
    pub first: u32,
    /// Local identifier of its port.
    pub lid: u16,
    /// Global identifier of its port.
    pub gid: [u8; 16],
    /// Code of the packet size.
    pub mtu: u8,
    /// Number of READs and atomics that it executes at a time.
    pub reads: u8,
}

impl Pair {
    pub(super) fn of(end: &End, mtu: u8) -> Pair {
        Pair { number: end.pair, first: end.first, lid: end.lid, gid: end.gid, mtu, reads: end.reads }
    }

    /// Checks a description that a peer has sent.
    pub(super) fn check(&self) -> Result<End, String> {
        let Pair { number, first, lid, gid, mtu, reads } = *self;
        let end = End { pair: number, first, lid, gid, reads };
        setup::check(&end)?;
        if (1..=5).contains(&mtu) { Ok(end) } else { Err(format!("the code {mtu} is no size of packets")) }
    }
}

/// A piece of a region's memory that the NIC reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// Address of the first byte.
    pub at: u64,
    /// Number of bytes.
    pub len: u64,
    /// The device's key for it.
    pub rkey: u32,
}
