//! What a client asks of a node itself: its catalog of stores.
//!
//! Questions and answers are JSON, carried by a call to [`crate::fabric::ServiceId::NODE`] on the data fabric, so
//! that one url is all that a client needs. None of this is on the path of data.

use crate::arena::session::Counters;
use crate::fabric::DEADLINE;
use crate::key::Key;
use crate::service::Extent;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A question.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Ask {
    /// Make a store.
    CreateStore {
        /// A new name.
        name: String,
        /// A kind that the node knows, such as `prism-kv`.
        kind: String,
        /// What the kind wants to know, as JSON.
        parameters: String,
        /// Bytes of memory for tables and buffers together.
        quota: u64,
    },
    /// Take a store away with everything in it.
    DropStore {
        /// Its name.
        name: String,
    },
    /// Where a store is, and its key.
    OpenStore {
        /// Its name.
        name: String,
    },
    /// All stores.
    ListStores,
    /// How a store's memory is used. Looks at every buffer's state.
    StoreStat {
        /// Its name.
        name: String,
    },
    /// About the node.
    NodeInfo,
    /// Give a store another table; the answer comes when the catalog shows both. What is in the former one is moved
    /// while the store is used.
    RebuildStore {
        /// Its name.
        name: String,
        /// What its kind wants to know of the table, as JSON.
        parameters: String,
    },
    /// A client has found no place in a store's table: let it grow, unless it is being rebuilt already. The answer
    /// comes when the catalog shows both tables.
    GrowStore {
        /// Its name.
        name: String,
    },
    /// Look for buffers that nobody holds or reaches; the answer comes when the scan has ended.
    Scan {
        /// In which store.
        name: String,
    },
}

impl Ask {
    /// How long an answer may take: longer than a call's usual deadline where all of a store's memory is looked at,
    /// granted or zeroed.
    pub const fn patience(&self) -> Duration {
        match self {
            Ask::CreateStore { .. }
            | Ask::DropStore { .. }
            | Ask::RebuildStore { .. }
            | Ask::GrowStore { .. }
            | Ask::StoreStat { .. }
            | Ask::Scan { .. } => Duration::from_secs(30),
            Ask::OpenStore { .. } | Ask::ListStores | Ask::NodeInfo => DEADLINE,
        }
    }
}

/// An answer. A refusal is the call's error, not an answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// It is done.
    Done,
    /// A store.
    Store(Store),
    /// All of them, by name, without their keys.
    Stores(Vec<Store>),
    /// How its memory is used.
    StoreStat(StoreStat),
    /// About the node.
    NodeInfo(NodeInfo),
}

/// A store as the catalog has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Store {
    /// Its name.
    pub name: String,
    /// Its kind.
    pub kind: String,
    /// What its kind has planned, as JSON.
    pub parameters: String,
    /// Bytes that its table and buffers may take.
    pub quota: u64,
    /// Of the node's memory: a store of another incarnation is another store.
    pub incarnation: u64,
    /// The region's number and, for who opens the store, its secret.
    pub region: u32,
    /// Zero in lists.
    pub secret: u64,
    /// Where its table begins.
    pub table_at: u64,
    /// Bytes of its table.
    pub table_len: u64,
    /// Whether it was planned wide ([`crate::service::Plan::wide`]): only engines may run its chains.
    #[serde(default)]
    pub wide: bool,
    /// Drawn when it was made: whatever becomes of its table and key, it is the same store. Zero in lists.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub id: u64,
    /// The table that it had before, while that is being left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub former: Option<Former>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde hands it a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A table that a store is leaving.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Former {
    /// What its kind had planned, as JSON.
    pub parameters: String,
    /// Where it begins.
    pub table_at: u64,
    /// Bytes of it.
    pub table_len: u64,
    /// How much of it was moved.
    #[serde(default)]
    pub moved_percent: u8,
    /// The region's secret once it is left; zero for everyone but the node.
    #[serde(default)]
    pub next_secret: u64,
    /// The table that the store was leaving already when it came to leave this one: there was no place in this one for
    /// all that was in that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<Box<Former>>,
}

impl Store {
    /// Its table and key.
    pub fn extent(&self) -> Extent {
        Extent { key: self.key(), at: self.table_at, len: self.table_len }
    }

    /// The tables that it is leaving, oldest first, with their parameters: most often none, or one.
    pub fn formers(&self) -> Vec<(&str, Extent)> {
        let newest_first = std::iter::successors(self.former.as_ref(), |former| former.before.as_deref());
        let mut formers: Vec<(&str, Extent)> = newest_first
            .map(|former| {
                let extent = Extent { key: self.key(), at: former.table_at, len: former.table_len };
                (&former.parameters[..], extent)
            })
            .collect();
        formers.reverse();
        formers
    }

    fn key(&self) -> Key {
        Key::new(self.region, self.secret)
    }
}

/// How a store's memory is used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreStat {
    /// Bytes that it may take.
    pub quota_bytes: u64,
    /// Bytes of its table.
    pub table_bytes: u64,
    /// Bytes of segments that no class has yet, the reserve included.
    pub granted_bytes: u64,
    /// Bytes of segments that hold buffers.
    pub buffer_segment_bytes: u64,
    /// Buffers allocated and not given back.
    pub live_buffers: u64,
    /// Bytes of those.
    pub live_bytes: u64,
    /// Buffers on free lists.
    pub free_buffers: u64,
    /// Bytes of those.
    pub free_bytes: u64,
    /// Buffers given back, waiting until nobody can follow an old pointer to them.
    pub retired_buffers: u64,
    /// Buffers set aside so that their segment can be taken back.
    pub parked_buffers: u64,
    /// Processes in the middle of a turn that memory waits for: if one stays here, it is stopped.
    pub delaying_pids: Vec<u32>,
    /// While its table is being rebuilt: how much of the former one was moved.
    #[serde(default)]
    pub moved_percent: Option<u8>,
}

/// About a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeInfo {
    /// Its release.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Drawn when its memory was made.
    pub incarnation: u64,
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// Bytes of it that no store has.
    pub unassigned_bytes: u64,
    /// Of the pages that back it.
    pub page_size: u64,
    /// Where its engines serve, as urls.
    #[serde(default)]
    pub listening: Vec<String>,
    /// Clients connected.
    pub sessions: u64,
    /// Buffers that came back to their lists, in all.
    pub reclaimed_buffers: u64,
    /// Buffers that scans found lost, in all.
    pub scanned_buffers: u64,
    /// What its engines have refused.
    #[serde(default)]
    pub refusals: Refusals,
    /// What its clients have had run; nothing for whom it is not told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic: Option<Traffic>,
}

/// What clients have had run on a node's memory since that was made: by themselves or by its engines. They count it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Traffic {
    /// Chains.
    pub chains: u64,
    /// Ops in them.
    pub ops: u64,
    /// CAS and FETCH-ADD among those.
    pub atomics: u64,
    /// Bytes of the chains on the wire, or as they would be there.
    pub request_bytes: u64,
    /// Bytes of the replies, likewise.
    pub reply_bytes: u64,
    /// Chains that found no buffer.
    pub not_ready: u64,
    /// Chains refused for access or as invalid.
    pub refused: u64,
    /// Buffers given back by clients.
    pub retired_buffers: u64,
}

impl From<Counters> for Traffic {
    fn from(counted: Counters) -> Traffic {
        Traffic {
            chains: counted.chains,
            ops: counted.ops,
            atomics: counted.atomics,
            request_bytes: counted.bytes_in,
            reply_bytes: counted.bytes_out,
            not_ready: counted.not_ready,
            refused: counted.refused,
            retired_buffers: counted.retired,
        }
    }
}

/// What a node's engines have refused since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Refusals {
    /// Greetings without a token that is known.
    pub bad_tokens: u64,
    /// Greetings from where too many wrong tokens came, unseen.
    pub locked_out: u64,
    /// Datagrams that did not know their session's secret.
    pub bad_secrets: u64,
    /// Chains with a key that their session was never given.
    pub wrong_keys: u64,
    /// Chains refused for access or as invalid, those included.
    pub chains: u64,
    /// Questions that a token may not ask.
    pub asks: u64,
    /// Packets, where they are sealed, that no known token's key has sealed, or that were changed on their way.
    pub forged: u64,
    /// Sealed packets that had come before.
    pub replayed: u64,
}

impl Refusals {
    /// Adds another engine's.
    pub fn add(&mut self, other: &Refusals) {
        self.bad_tokens += other.bad_tokens;
        self.locked_out += other.locked_out;
        self.bad_secrets += other.bad_secrets;
        self.wrong_keys += other.wrong_keys;
        self.chains += other.chains;
        self.asks += other.asks;
        self.forged += other.forged;
        self.replayed += other.replayed;
    }
}
