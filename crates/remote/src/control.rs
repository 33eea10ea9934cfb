//! Requests to the node itself, about its catalog of stores.
//!
//! Requests and responses are JSON, sent as a call to [`crate::fabric::ServiceId::NODE`] on the data fabric, so that a
//! client needs only one url. Operations on a store's items never use these requests.

use crate::arena::session::Counters;
use crate::fabric::DEADLINE;
use crate::key::Key;
use crate::service::Extent;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A request to the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Ask {
    /// Creates a store.
    CreateStore {
        /// Name of the new store.
        name: String,
        /// Kind of the store, which the node must support, such as `prism-kv`.
        kind: String,
        /// The kind's parameters, as JSON.
        parameters: String,
        /// Bytes of memory for tables and buffers together.
        quota: u64,
    },
    /// Creates this node's member of a store with several members. The member is PREPARED: its key opens nothing until
    /// an [`Ask::Decide`] commits the store. Never sent twice for one attempt. Or the member is JOINING: it is a member
    /// of a configuration that is not decided, clients get its key after an [`Ask::Enable`], and recoverers get one by
    /// [`Ask::Revoke`].
    PrepareStore {
        /// Name of the new store.
        name: String,
        /// Kind of the store.
        kind: String,
        /// The kind's parameters for this member, as JSON.
        parameters: String,
        /// Bytes of memory for the tables and buffers of this member.
        quota: u64,
        /// The store's members, and the index of this member among them. The state is [`MemberState::Prepared`], or
        /// [`MemberState::Joining`] if the configuration is not the first.
        membership: Membership,
    },
    /// Decides on an attempt to create a store. The first member decides; a client then reports its decision to the
    /// others.
    Decide {
        /// Name of the store.
        name: String,
        /// The attempt that created the store.
        attempt: Attempt,
        /// The requested decision.
        decision: Decision,
    },
    /// Returns the node's incarnation and its store of this name, without the store's key, if there is one. Unlike
    /// [`Ask::OpenStore`], not refused if there is none.
    FindStore {
        /// Name of the store.
        name: String,
    },
    /// Drops a store and all its data.
    DropStore {
        /// Name of the store.
        name: String,
    },
    /// Returns a store's location and its key.
    OpenStore {
        /// Name of the store.
        name: String,
    },
    /// Lists all stores.
    ListStores,
    /// Reports how a store's memory is used. Slow: the node reads every buffer's state.
    StoreStat {
        /// Name of the store.
        name: String,
    },
    /// Reports the node's version, memory, sessions and traffic.
    NodeInfo,
    /// Gives a store another table. The node responds when the catalog shows both tables. Entries of the former table
    /// are moved while the store is in use.
    RebuildStore {
        /// Name of the store.
        name: String,
        /// The kind's parameters for the table, as JSON.
        parameters: String,
    },
    /// Gives a store a larger table; a client sends this if it found no free slot. Starts no second rebuild if one is
    /// in progress. The node responds when the catalog shows both tables.
    GrowStore {
        /// Name of the store.
        name: String,
    },
    /// Scans a store for buffers that no client holds and no pointer reaches. The node responds when the scan has
    /// finished. No command of the binary sends this; tests and trials do.
    Scan {
        /// Name of the store.
        name: String,
    },
    /// Binds the session that sends this request to a client's nonce, for one store. The node responds once it has
    /// recorded the binding. A session has at most one nonce per store. Several sessions may have the same nonce, and a
    /// client that reopens a session binds it to the same nonce again.
    ///
    /// The node refuses a nonce that was fenced for this store ([`crate::FabricError::is_fenced`]).
    Bind {
        /// Name of the store.
        name: String,
        /// The store's [`Store::id`].
        id: u64,
        /// The client's number, which other clients find in the locks that it holds.
        client: u32,
        /// Random number that the client drew when it started. Not 0.
        nonce: u64,
    },
    /// Asks for the time since the store's creation, by the node's real-time clock.
    Wall {
        /// Name of the store.
        name: String,
        /// The store's [`Store::id`].
        id: u64,
    },
    /// Fences the client with this nonce, for one store. The node first records that it refuses the nonce from now on,
    /// then ends all sessions that are bound to it for this store. It responds once no chain and no call of these
    /// sessions runs any more; none will run later. A node that takes over refuses the nonce, too.
    ///
    /// Repeating the request does no harm. If a stopped process delays the response, the request is refused with the
    /// process's id. The nonce then is recorded, and a repeated request waits again.
    Fence {
        /// Name of the store.
        name: String,
        /// The store's [`Store::id`].
        id: u64,
        /// The nonce of the client's sessions.
        nonce: u64,
    },
    /// Asks a member of a store to promise a ballot in the register that decides which members the next configuration
    /// has. The member is an acceptor of this register. It promises the ballot unless it has promised a higher one, and
    /// records what it promised and accepted before it answers.
    Promise {
        /// Name of the store.
        name: String,
        /// The attempt that created the store.
        attempt: Attempt,
        /// Number of the configuration to decide: one more than the member's.
        configuration: u64,
        /// The ballot.
        ballot: Ballot,
    },
    /// Asks a member of a store to accept a list of members for the next configuration. The member accepts the list
    /// unless it has promised a higher ballot. If f + 1 of 2f + 1 members have accepted the same ballot, its list is
    /// decided, for ever.
    Accept {
        /// Name of the store.
        name: String,
        /// The attempt that created the store.
        attempt: Attempt,
        /// Number of the configuration to decide: one more than the member's.
        configuration: u64,
        /// The ballot, which the requester has had promised by f + 1 members.
        ballot: Ballot,
        /// Members of the configuration.
        members: Vec<MemberId>,
    },
    /// Revokes the key of this member under a configuration, and gives the requester, which is a recoverer, another key
    /// that clients do not get. The node responds once no chain that the former key admitted runs any more. Repeating
    /// the request does no harm. A member that is JOINING the next configuration only gives its key.
    ///
    /// If a stopped process delays the response, the request is refused with the process's id. The key then is revoked,
    /// and a repeated request waits again.
    Revoke {
        /// Name of the store.
        name: String,
        /// The attempt that created the store.
        attempt: Attempt,
        /// Number of the configuration whose key is revoked.
        configuration: u64,
    },
    /// Lets this member serve a configuration that was decided: clients get a new key, and all former keys are revoked.
    /// Never sent before what the former configuration had stored is at a majority of this one's members. Repeating the
    /// request does no harm.
    Enable {
        /// Name of the store.
        name: String,
        /// The attempt that created the store.
        attempt: Attempt,
        /// Number of the configuration.
        configuration: u64,
        /// Members of the configuration.
        members: Vec<MemberId>,
    },
    /// Drops this member of a store, which exists without it: it was replaced, or was to join a configuration that was
    /// not decided. Refused if the member's membership is another than the given one.
    Leave {
        /// Name of the store.
        name: String,
        /// The member's membership, as the requester has found it.
        membership: Membership,
    },
}

impl Ask {
    /// Maximum time to wait for the response: longer than a call's usual deadline if the request reads, grants or
    /// zeroes all of a store's memory.
    pub const fn patience(&self) -> Duration {
        match self {
            Ask::CreateStore { .. }
            | Ask::PrepareStore { .. }
            | Ask::Decide { .. }
            | Ask::DropStore { .. }
            | Ask::RebuildStore { .. }
            | Ask::GrowStore { .. }
            | Ask::StoreStat { .. }
            | Ask::Leave { .. }
            | Ask::Scan { .. } => Duration::from_secs(30),
            Ask::OpenStore { .. }
            | Ask::FindStore { .. }
            | Ask::ListStores
            | Ask::NodeInfo
            | Ask::Bind { .. }
            | Ask::Wall { .. }
            | Ask::Fence { .. }
            | Ask::Promise { .. }
            | Ask::Accept { .. }
            | Ask::Revoke { .. }
            | Ask::Enable { .. } => DEADLINE,
        }
    }
}

/// A node's response to an [`Ask`]. A refusal is the call's error, not a response.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The request was carried out. The response has no data.
    Done,
    /// A store's catalog entry.
    Store(Store),
    /// The catalog entries of all stores, sorted by name, without their keys.
    Stores(Vec<Store>),
    /// Statistics of a store's memory.
    StoreStat(StoreStat),
    /// The node's state.
    NodeInfo(NodeInfo),
    /// The outcome of an [`Ask::Decide`].
    Decided(Decided),
    /// The response to an [`Ask::FindStore`].
    Found(Found),
    /// Microseconds since the store's creation; 0 if the node's clock shows an earlier time.
    Wall(u64),
    /// The response to an [`Ask::Promise`] or [`Ask::Accept`]: the state that holds now.
    Register(Register),
}

/// Number of a proposal in the register that decides on a configuration: a round, and a random number of the proposer.
/// Compared in this order, so that two proposers never have the same ballot. `[0, 0]` is no ballot.
pub type Ballot = [u64; 2];

/// Largest round of a ballot. Each proposer increases the round by one, so no correct proposer reaches it.
pub const ROUND_MAX: u64 = u64::MAX / 2;

/// How far the round of a ballot may be ahead of the highest round that an acceptor has promised. The distance grows by
/// one with each ballot that the acceptor has missed.
pub const ROUNDS_AHEAD_MAX: u64 = 1 << 32;

/// Largest number of a configuration. Each replacement increases the number by one, so no store reaches it.
pub const CONFIGURATION_MAX: u64 = u64::MAX / 2;

/// State of an acceptor of the register that decides which members a store's next configuration has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Register {
    /// The highest ballot that the acceptor has promised.
    pub promised: Ballot,
    /// The list of members that the acceptor has accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accepted: Option<Accepted>,
}

impl Register {
    /// Checks that an acceptor can have this state.
    ///
    /// # Errors
    /// No acceptor has it. The text names the reason.
    pub fn check(&self) -> Result<(), String> {
        if self.promised[0] > ROUND_MAX {
            return Err(format!("the round {} of a ballot is not possible", self.promised[0]));
        }
        let Some(accepted) = &self.accepted else { return Ok(()) };
        accepted.check()?;
        match accepted.ballot > self.promised {
            true => Err("an acceptor accepted more than it promised".into()),
            false => Ok(()),
        }
    }
}

/// A list of members that an acceptor has accepted. It need not be decided.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accepted {
    /// The ballot.
    pub ballot: Ballot,
    /// Members of the next configuration.
    pub members: Vec<MemberId>,
}

impl Accepted {
    /// Checks that the ballot is possible, and the list of members well-formed ([`check_members`]).
    ///
    /// # Errors
    /// No acceptor accepts this. The text names the reason.
    pub fn check(&self) -> Result<(), String> {
        if !(1..=ROUND_MAX).contains(&self.ballot[0]) {
            return Err(format!("the round {} of a ballot is not possible", self.ballot[0]));
        }
        check_members(&self.members)
    }
}

/// Random number that identifies an attempt to create a store with several members.
pub type Attempt = [u64; 2];

/// A requested decision on an attempt to create a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// Commits the store.
    Commit,
    /// Aborts the attempt, and frees its memory. At the first member, changes nothing if the store is committed.
    Abort,
    /// Drops the store, committed or not, and frees its memory.
    Drop,
}

/// State of a member of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemberState {
    /// The member's memory is granted, and the attempt is not decided as far as this member knows.
    Prepared,
    /// The store was created, and the member serves clients of its configuration.
    Committed,
    /// The member's configuration ends: its key is revoked, and recoverers have another one.
    Revoked,
    /// The member belongs to a configuration that it does not serve yet, and belonged to none before.
    Joining,
    /// The attempt was aborted, or the store was dropped. No catalog contains this state: the member is removed.
    Aborted,
}

/// A member of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberId {
    /// Place of the member's node in the pool of the client that created the store. A hint only: other clients may list
    /// the nodes in another order.
    pub node: u32,
    /// Incarnation of the memory of the member's node. Identifies the member.
    pub incarnation: u64,
}

/// Maximum number of members of a store.
pub const MEMBERS_MAX: usize = 64;

/// The members of a store that lies on several nodes, from the view of one of the members.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Membership {
    /// The attempt that created the store. Two stores of one name differ in it.
    pub attempt: Attempt,
    /// State of this member.
    pub state: MemberState,
    /// Index of this member in `members`. The member 0 decides on the attempt.
    pub index: u32,
    /// Number of the configuration, 1 at creation.
    pub configuration: u64,
    /// All members.
    pub members: Vec<MemberId>,
}

/// Checks that a list of members is well-formed: 2 to [`MEMBERS_MAX`] members with distinct incarnations.
///
/// # Errors
/// The list is not well-formed. The text names the reason.
pub fn check_members(members: &[MemberId]) -> Result<(), String> {
    let count = members.len();
    if !(2..=MEMBERS_MAX).contains(&count) {
        return Err(format!("a store has 2 to {MEMBERS_MAX} members, not {count}"));
    }
    let distinct: BTreeSet<u64> = members.iter().map(|member| member.incarnation).collect();
    if distinct.len() != count {
        return Err("two members of the store are the same node's memory".into());
    }
    Ok(())
}

impl Membership {
    /// Checks that the list of members is well-formed ([`check_members`]), and that one of them is this member, with
    /// this incarnation.
    ///
    /// # Errors
    /// The list is not well-formed. The text names the reason.
    pub fn check(&self, incarnation: u64) -> Result<(), String> {
        check_members(&self.members)?;
        let own = self.members.get(self.index as usize).map(|member| member.incarnation);
        if own != Some(incarnation) {
            return Err(format!("member {} of the store is not this node's memory", self.index));
        }
        let is_first = self.configuration == 1;
        let is_possible = match self.state {
            MemberState::Aborted => false,
            MemberState::Prepared => is_first,
            MemberState::Joining => !is_first,
            MemberState::Committed | MemberState::Revoked => true,
        };
        if !(1..=CONFIGURATION_MAX).contains(&self.configuration) || !is_possible {
            return Err("the state of the store's member is invalid".into());
        }
        Ok(())
    }
}

/// Outcome of an [`Ask::Decide`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decided {
    /// Incarnation of the node's memory.
    pub incarnation: u64,
    /// The state that holds now. [`MemberState::Aborted`] also if the node has no member of this attempt.
    pub state: MemberState,
}

/// Response to an [`Ask::FindStore`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// Incarnation of the node's memory.
    pub incarnation: u64,
    /// The node's store of this name, without its key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<Store>,
    /// The members that this member has accepted for the store's next configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accepted: Option<Accepted>,
}

/// A store's entry in the catalog.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Store {
    /// The store's name.
    pub name: String,
    /// The store's kind, such as `prism-kv`.
    pub kind: String,
    /// The store's parameters, as completed by [`crate::service::Kind::plan`], as JSON.
    pub parameters: String,
    /// Maximum size of the store's table and buffers together, in bytes.
    pub quota: u64,
    /// Incarnation of the node's memory: a random number, drawn when the memory was created. Equal names in two
    /// incarnations are different stores.
    pub incarnation: u64,
    /// Number of the store's region.
    pub region: u32,
    /// Secret of the region's key; zero in lists of stores.
    pub secret: u64,
    /// Address of the store's table.
    pub table_at: u64,
    /// Size of the store's table, in bytes.
    pub table_len: u64,
    /// Whether only engines may run the store's chains ([`crate::service::Plan::wide`]).
    #[serde(default)]
    pub wide: bool,
    /// Time of the store's creation by the node's real-time clock, in microseconds since the Unix epoch. Zero in lists
    /// of stores, and in stores of earlier releases, whose time counts from the epoch itself.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub created: u64,
    /// Random number drawn when the store was created, which identifies the store even if its table and key change.
    /// Zero in lists of stores.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub id: u64,
    /// The previous table, while its entries are being moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub former: Option<Former>,
    /// The members of the store, if it has several. `None` if the whole store lies on this node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub membership: Option<Membership>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde hands it a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A previous table of a store that is being rebuilt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Former {
    /// The store's parameters with this table, as JSON.
    pub parameters: String,
    /// Address of the table.
    pub table_at: u64,
    /// Size of the table, in bytes.
    pub table_len: u64,
    /// Share of the table's entries that were moved to the next table, in percent.
    #[serde(default)]
    pub moved_percent: u8,
    /// The secret that the region gets once the move is complete. Zero in responses: only the node knows it.
    #[serde(default)]
    pub next_secret: u64,
    /// An even older table whose move is not complete, since this table had no space for all of that table's entries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<Box<Former>>,
}

impl Store {
    /// Whether the store has several members and is not known to be committed. If so, its key opens nothing.
    pub fn is_prepared(&self) -> bool {
        self.membership.as_ref().is_some_and(|membership| membership.state == MemberState::Prepared)
    }

    /// Whether clients may have the store's key, as far as the store's members are concerned.
    pub fn is_served(&self) -> bool {
        self.membership.as_ref().is_none_or(|membership| membership.state == MemberState::Committed)
    }

    /// Numbers that identify the store: the same at all of its members, and different for any other store. Not valid in
    /// lists of stores, where [`Store::id`] is zero.
    pub fn identity(&self) -> [u64; 2] {
        match &self.membership {
            Some(membership) => membership.attempt,
            None => [self.id, self.incarnation],
        }
    }

    /// Whether `other` is this store, perhaps in other memory: a node that has lost its memory makes a store again from
    /// its log, with the same id. Not valid in lists of stores.
    pub fn is(&self, other: &Store) -> bool {
        let has_one_member = self.membership.is_none() && other.membership.is_none();
        let is_same = match has_one_member && self.id != 0 {
            true => self.id == other.id,
            false => self.identity() == other.identity(),
        };
        is_same && self.kind == other.kind
    }

    /// The location of the current table, with the store's key.
    pub fn extent(&self) -> Extent {
        Extent { key: self.key(), at: self.table_at, len: self.table_len }
    }

    /// The former tables, oldest first, with their parameters: usually none or one.
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

/// Statistics of a store's memory, by state of its buffers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreStat {
    /// Maximum size of the store, in bytes.
    pub quota_bytes: u64,
    /// Size of the store's table, in bytes.
    pub table_bytes: u64,
    /// Bytes of granted segments that are not assigned to a class yet, including the reserve.
    pub granted_bytes: u64,
    /// Bytes of segments that hold buffers.
    pub buffer_segment_bytes: u64,
    /// Number of buffers that are allocated and not retired.
    pub live_buffers: u64,
    /// Total size of the live buffers, in bytes.
    pub live_bytes: u64,
    /// Number of buffers on free lists.
    pub free_buffers: u64,
    /// Total size of the free buffers, in bytes.
    pub free_bytes: u64,
    /// Number of retired buffers, which the node frees once no client can follow an old pointer to them.
    pub retired_buffers: u64,
    /// Number of buffers that are set aside until their whole segment is free and can be granted again.
    pub parked_buffers: u64,
    /// Pids of the processes for whose turns reclamation waits. A process that stays in this list is stopped
    /// (suspended).
    pub delaying_pids: Vec<u32>,
    /// Leased ids of clients for the end of whose operations reclamation waits, at most one for each member. A client
    /// that stays in this list is stopped, or runs an operation that does not end.
    #[serde(default)]
    pub delaying_ids: Vec<u16>,
    /// Progress of the rebuild of the store's table in percent, if one is in progress.
    #[serde(default)]
    pub moved_percent: Option<u8>,
    /// Number of scans of the store for leaked buffers that the node's process has completed since it started.
    #[serde(default)]
    pub scans: u64,
    /// Numbers that the store's service reports ([`crate::service::Service::report`]), and those of its log, by their
    /// names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub service: BTreeMap<String, u64>,
}

impl StoreStat {
    /// Whether the store lies in its table alone.
    pub fn is_table_only(&self) -> bool {
        self.table_bytes > 0 && self.granted_bytes == 0 && self.buffer_segment_bytes == 0
    }

    /// Adds the statistics of another member of the store. The progress of a rebuild is that of the slowest member, and
    /// the number of scans is the smallest.
    pub fn add(&mut self, other: &StoreStat) {
        let is_first = *self == StoreStat::default();
        self.quota_bytes += other.quota_bytes;
        self.table_bytes += other.table_bytes;
        self.granted_bytes += other.granted_bytes;
        self.buffer_segment_bytes += other.buffer_segment_bytes;
        self.live_buffers += other.live_buffers;
        self.live_bytes += other.live_bytes;
        self.free_buffers += other.free_buffers;
        self.free_bytes += other.free_bytes;
        self.retired_buffers += other.retired_buffers;
        self.parked_buffers += other.parked_buffers;
        self.delaying_pids.extend(&other.delaying_pids);
        self.delaying_ids.extend(&other.delaying_ids);
        self.moved_percent = self.moved_percent.into_iter().chain(other.moved_percent).min();
        self.scans = if is_first { other.scans } else { self.scans.min(other.scans) };
        for (name, number) in &other.service {
            *self.service.entry(name.clone()).or_default() += number;
        }
    }
}

/// A node's state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeInfo {
    /// Version of the node's software.
    pub version: String,
    /// Process id of the node.
    pub pid: u32,
    /// Random number drawn when the node's memory was created.
    pub incarnation: u64,
    /// Size of the node's memory, in bytes.
    pub memory_bytes: u64,
    /// Bytes of memory that no store owns.
    pub unassigned_bytes: u64,
    /// Size of the pages that back the memory, in bytes.
    pub page_size: u64,
    /// Urls at which the node's engines listen.
    #[serde(default)]
    pub listening: Vec<String>,
    /// Number of connected clients.
    pub sessions: u64,
    /// Total number of buffers returned to their free lists.
    pub reclaimed_buffers: u64,
    /// Total number of leaked buffers that scans found, not of those that they read.
    pub scanned_buffers: u64,
    /// Requests that the node's engines refused.
    #[serde(default)]
    pub refusals: Refusals,
    /// Traffic of the node's clients; `None` if the caller may not see it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic: Option<Traffic>,
}

/// Chains that clients have run on a node's memory since that memory was created, by themselves or through the node's
/// engines. The values are the sums of the sessions' counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Traffic {
    /// Number of chains.
    pub chains: u64,
    /// Number of ops in those chains.
    pub ops: u64,
    /// Number of CAS and FETCH-ADD ops in those chains.
    pub atomics: u64,
    /// Bytes of the chains in wire form.
    pub request_bytes: u64,
    /// Bytes of the replies in wire form.
    pub reply_bytes: u64,
    /// Chains that failed because no buffer was free ([`crate::Status::NotReady`]).
    pub not_ready: u64,
    /// Number of chains refused for lack of rights, or as invalid.
    pub refused: u64,
    /// Number of buffers that clients retired.
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

/// Requests that a node's engines have refused since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Refusals {
    /// Number of greetings without a known token.
    pub bad_tokens: u64,
    /// Number of greetings rejected without reading the token, since their source had sent too many wrong tokens.
    pub locked_out: u64,
    /// Number of datagrams with a wrong session secret.
    pub bad_secrets: u64,
    /// Number of chains with a key that was never issued to their session.
    pub wrong_keys: u64,
    /// Chains refused for access or as invalid, including `wrong_keys`.
    pub chains: u64,
    /// Number of requests to the node ([`Ask`]) that the session's token does not permit.
    pub asks: u64,
    /// Number of sealed packets that no known token's key has sealed, or that were modified in transit.
    pub forged: u64,
    /// Number of sealed packets that had been received before.
    pub replayed: u64,
}

impl Refusals {
    /// Adds another engine's counters.
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
