//! Opens stores: fetches a store's description from the catalog and checks that the client can use the store.
//!
//! Invariant: no function of this module changes a store, so every error means that nothing was changed.

use crate::ask::ask;
use crate::members::REPLICAS_MAX;
use crate::registry::{Registered, named};
use crate::system::{Family, Nodes, Options, System};
use farside_remote::arena::class::Class;
use farside_remote::clock::Clock;
use farside_remote::control::{Answer, Ask, MemberState, Membership, Store};
use farside_remote::fabric::Ran;
use farside_remote::{Capabilities, Fabric, FabricError, NodeId};

/// Reason why a store was not opened. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreError {
    /// The store cannot be used, for this reason: the catalog has no such store, or has another store under its name,
    /// or the store was not opened or healed.
    Gone(String),
    /// The fabric lacks a capability that the system needs.
    Lacks {
        /// Kind of the store's system.
        kind: &'static str,
        /// Node that holds the store.
        node: NodeId,
        /// Capabilities that the system needs.
        needs: Capabilities,
        /// Capabilities that the fabric has.
        has: Capabilities,
    },
    /// The fabric returned no response. If the request would have changed the store, [`FabricError::ran`] says whether
    /// it may have done so.
    Fabric(FabricError),
    /// A member of the store has lost its memory.
    MemoryLost {
        /// Name of the store.
        name: String,
        /// Index of the member.
        member: u32,
        /// Node that held the member.
        node: NodeId,
        /// What the store has lost with it.
        loss: Loss,
    },
    /// A member of the store is being replaced, so this member serves no client.
    BeingReplaced {
        /// Name of the store.
        name: String,
    },
    /// Members of the store were replaced since it was opened. Its clients open it again by themselves.
    Replaced {
        /// Name of the store.
        name: String,
    },
    /// Another client is creating the store.
    BeingCreated {
        /// Name of the store.
        name: String,
    },
}

/// Consequence of the loss of a member's memory for its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// The items of the member are lost, since no other member has them.
    Items,
    /// Nothing is lost: other members have all that it had, and a recoverer replaces the lost one.
    Replaceable,
    /// Nothing is lost: other replicas have all blocks. Stores of this kind replace no replica.
    Irreplaceable,
    /// All blocks are lost, with the memory of a majority of the replicas.
    Majority,
}

impl Loss {
    /// Returns the consequence for a store that has lost the memory of this number of its members.
    pub(crate) fn of(store: &Store, lost: usize) -> Loss {
        let members = store.membership.as_ref().map_or(1, |of| of.members.len());
        match named(&store.kind) {
            Some(system) if lost <= (system.losses)(&store.parameters, members) => Loss::Replaceable,
            Some(system) if system.nodes == Nodes::Replicas && 2 * lost > members => Loss::Majority,
            Some(system) if system.nodes == Nodes::Replicas => Loss::Irreplaceable,
            _ => Loss::Items,
        }
    }
}

impl StoreError {
    /// Returns the error for a client whose store was replaced by `store`, a newer store of the same name.
    pub fn another(store: &Store) -> StoreError {
        StoreError::Gone(format!(
            "store '{}' was replaced by a new store of the same name: what this client stored is lost; open it again",
            store.name
        ))
    }
}

impl std::fmt::Display for StoreError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            StoreError::Gone(reason) => f.write_str(reason),
            StoreError::Lacks { kind, node, needs, has } => write!(
                f,
                "{kind} stores need a fabric with {needs}, and the one to node {} lacks {} (it has: {has}): nothing \
                 was changed; reach the node by another fabric, or use a store of another kind",
                node.0,
                needs.without(*has)
            ),
            StoreError::Fabric(error) => error.fmt(f),
            StoreError::MemoryLost { name, member, node, loss: Loss::Items } => write!(
                f,
                "store '{name}' has lost the memory of its member {member} at node {}, with all items in it: drop the \
                 store with 'farside store drop {name}', then create and load it again",
                node.0
            ),
            StoreError::MemoryLost { name, member, node, loss: Loss::Replaceable } => write!(
                f,
                "store '{name}' has lost the memory of its member {member} at node {}, and its other members have all \
                 that it had: replace the lost one with 'farside heal'",
                node.0
            ),
            StoreError::MemoryLost { name, member, node, loss: Loss::Irreplaceable } => write!(
                f,
                "store '{name}' has lost the memory of its member {member} at node {}, and its other members have all \
                 blocks: copy them to a new volume, since no member of such a store can be replaced",
                node.0
            ),
            StoreError::MemoryLost { name, member, node, loss: Loss::Majority } => write!(
                f,
                "store '{name}' has lost the memory of a majority of its members, with all blocks, and so that of \
                 member {member} at node {}: drop its volume with 'farside volume drop', then create and write it \
                 again",
                node.0
            ),
            StoreError::BeingReplaced { name } => write!(
                f,
                "a member of store '{name}' is being replaced, and too few others serve the store meanwhile: retry in \
                 a moment; if the replacement was interrupted, complete it with 'farside heal'"
            ),
            StoreError::Replaced { name } => write!(
                f,
                "a member of store '{name}' was replaced since this client opened the store: open it again"
            ),
            StoreError::BeingCreated { name } => write!(
                f,
                "store '{name}' is being created by another client: retry in a moment; if that client has ended, drop \
                 the store with 'farside store drop {name}'"
            ),
        }
    }
}

impl std::error::Error for StoreError {}

/// Fetches the description of a store of any kind from the catalog of `node`, with one call.
///
/// # Errors
/// The store does not exist, or the node does not respond.
pub async fn fetch<F: Fabric>(fabric: &F, node: NodeId, name: &str) -> Result<Store, StoreError> {
    let answer = ask(fabric, node, &Ask::OpenStore { name: name.to_owned() }).await;
    let answer = answer.map_err(|error| match error {
        FabricError::Refused(reason) => StoreError::Gone(reason),
        other => StoreError::Fabric(other.map_ran(|_| Ran::No)),
    })?;
    match answer {
        Some(Answer::Store(store)) if is_sound(&store, name) => Ok(store),
        _ => Err(StoreError::Gone(format!(
            "the node's answer about store '{name}' is not understood: use the same release on both sides"
        ))),
    }
}

/// Whether a description of a store to open is that of the requested store, and its members, if any, are well-formed
/// and committed. A node may answer anything.
fn is_sound(store: &Store, name: &str) -> bool {
    let is_committed = |membership: &Membership| {
        membership.state == MemberState::Committed && membership.check(store.incarnation).is_ok()
    };
    store.name == name && store.membership.as_ref().is_none_or(is_committed)
}

/// Fetches the description of a store as [`fetch`] does, but requires a store of this kind.
///
/// # Errors
/// The errors of [`fetch`]; or the store is of another kind.
pub async fn fetch_of<F: Fabric>(
    fabric: &F,
    node: NodeId,
    name: &str,
    kind: &str,
) -> Result<Store, StoreError> {
    let store = fetch(fabric, node, name).await?;
    check_kind(&store, kind)?;
    Ok(store)
}

/// Opens the store called `name` at `node`, which must be a store of system `S`. Makes one call to the node, or none if
/// the fabric lacks a capability that `S` needs.
///
/// # Errors
/// [`StoreError`].
pub async fn open<S: System, F: Fabric + Clock>(
    fabric: F,
    node: NodeId,
    name: &str,
) -> Result<S::Client<F>, StoreError> {
    check_needs::<S>(&fabric, node)?;
    let store = fetch(&fabric, node, name).await?;
    S::open(fabric, &Members::one(node, store), &Options::default()).await
}

/// # Errors
/// The store is of another kind.
fn check_kind(store: &Store, kind: &str) -> Result<(), StoreError> {
    if store.kind == kind {
        return Ok(());
    }
    let wanted = match named(kind) {
        Some(Registered { family: Family::Memory, .. }) => format!("{kind} memory"),
        _ => format!("a {kind}"),
    };
    let reason = format!("store '{}' is a {}, not {wanted}: name another", store.name, store.kind);
    Err(StoreError::Gone(reason))
}

/// # Errors
/// The fabric lacks a capability that `S` needs.
fn check_needs<S: System>(fabric: &impl Fabric, node: NodeId) -> Result<(), StoreError> {
    let (needs, has) = (S::NEEDS, fabric.capabilities(node));
    if has.contains(needs) { Ok(()) } else { Err(StoreError::Lacks { kind: S::KIND, node, needs, has }) }
}

/// A member of a store: the node that holds it, and the store's description there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Node that holds the member.
    pub node: NodeId,
    /// Number of the session with the node in which the node granted the member's key, or of an earlier one
    /// ([`Fabric::session_number`]).
    pub session: u64,
    /// Description of the store in the node's catalog, with the member's key. The error of all operations on this
    /// member if the member has lost its memory ([`StoreError::MemoryLost`]), or did not answer
    /// ([`StoreError::Fabric`]).
    pub store: Result<Store, StoreError>,
}

/// Members of a store. At least one has a description.
///
/// A store on one node has one member. A store on several nodes has the members that were fixed when it was created, in
/// the order of their indices, and every member with a description is committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Members {
    list: Vec<Member>,
    /// Index of the first member with a description.
    first: usize,
    /// Number of nodes in the pool.
    nodes: u32,
}

impl Members {
    /// Creates the members of a store that lies on one node, over a fabric that opens no sessions by itself.
    pub fn one(node: NodeId, store: Store) -> Members {
        Members::granted(node, 0, store)
    }

    /// Creates the members of a store that lies on one node, which granted the store's key in this session.
    pub(crate) fn granted(node: NodeId, session: u64, store: Store) -> Members {
        Members { list: vec![Member { node, session, store: Ok(store) }], first: 0, nodes: 1 }
    }

    /// Creates the members of the part of a store that lies on one of its nodes, as if the part were a whole store.
    pub(crate) fn part(node: NodeId, session: u64, store: Store) -> Members {
        Members::granted(node, session, Store { membership: None, ..store })
    }

    /// Creates the members of a store in a pool of `nodes` nodes from its complete list.
    ///
    /// # Errors
    /// No member has a description. [`StoreError::BeingReplaced`] if a member says so: the others may do without those
    /// that do not answer. Else the error of the first that has not lost its memory, since the items of that one may
    /// still exist; if all have lost their memory, the error of the first.
    pub(crate) fn of(list: Vec<Member>, nodes: u32) -> Result<Members, StoreError> {
        match list.iter().position(|member| member.store.is_ok()) {
            Some(first) => Ok(Members { list, first, nodes }),
            None => {
                let mut errors: Vec<StoreError> =
                    list.into_iter().filter_map(|member| member.store.err()).collect();
                errors.sort_by_key(|error| match error {
                    StoreError::BeingReplaced { .. } => 0,
                    StoreError::MemoryLost { .. } => 2,
                    _ => 1,
                });
                Err(errors.into_iter().next().unwrap_or_else(|| {
                    StoreError::Gone("the store has no member: create it with 'farside store create'".into())
                }))
            }
        }
    }

    /// All members, by index.
    pub fn list(&self) -> &[Member] {
        &self.list
    }

    /// Number of nodes in the pool in which the store was found.
    pub(crate) fn nodes(&self) -> u32 {
        self.nodes
    }

    /// Number of the store's configuration; 1 unless members were replaced.
    pub fn configuration(&self) -> u64 {
        self.store().membership.as_ref().map_or(1, |membership| membership.configuration)
    }

    /// Description of the store at its first member that has one.
    pub fn store(&self) -> &Store {
        match &self.list[self.first].store {
            Ok(store) => store,
            Err(_) => unreachable!("the constructors require a member with a description"),
        }
    }

    /// Checks that the store's kind is that of `S`, and that `fabric` has every capability that `S` needs at every
    /// member.
    ///
    /// # Errors
    /// One of the checks failed, or some of the store's members are missing from this list.
    pub fn check<S: System>(&self, fabric: &impl Fabric) -> Result<(), StoreError> {
        check_kind(self.store(), S::KIND)?;
        self.list.iter().try_for_each(|member| check_needs::<S>(fabric, member.node))?;
        self.check_complete()
    }

    /// # Errors
    /// The store is of another kind than `S`.
    pub(crate) fn check_kind<S: System>(&self) -> Result<(), StoreError> {
        check_kind(self.store(), S::KIND)
    }

    /// # Errors
    /// The store is of another kind than `S`, has too many replicas, or some of its members are missing from this list.
    pub(crate) fn check_replicas<S: System>(&self) -> Result<(), StoreError> {
        self.check_complete()?;
        self.check_kind::<S>()?;
        let count = self.list.len();
        if count > REPLICAS_MAX {
            return Err(StoreError::Gone(format!(
                "store '{}' has {count} replicas, and at most {REPLICAS_MAX} are possible: use the release that \
                 created it",
                self.store().name
            )));
        }
        Ok(())
    }

    /// # Errors
    /// Some of the store's members are missing from this list.
    pub(crate) fn check_complete(&self) -> Result<(), StoreError> {
        let store = self.store();
        let count = store.membership.as_ref().map_or(1, |membership| membership.members.len());
        if count != self.list.len() {
            return Err(StoreError::Gone(format!(
                "store '{}' has {count} members, and only {} of their nodes are in the pool: name all of its nodes in \
                 --pool",
                store.name,
                self.list.len()
            )));
        }
        Ok(())
    }

    /// Returns all members with their descriptions, for systems whose operations may need every member: an index with
    /// one wiped member is lost everywhere.
    ///
    /// # Errors
    /// The error of a member that has lost its memory, else of one that did not answer; or some of the store's members
    /// are missing from this list.
    pub fn whole(&self) -> Result<Vec<(NodeId, &Store)>, StoreError> {
        self.check_complete()?;
        let errors = || self.list.iter().filter_map(|member| member.store.as_ref().err());
        let lost = errors().find(|error| matches!(error, StoreError::MemoryLost { .. }));
        match lost.or_else(|| errors().next()) {
            Some(error) => Err(error.clone()),
            None => {
                let stores =
                    self.list.iter().filter_map(|member| Some((member.node, member.store.as_ref().ok()?)));
                Ok(stores.collect())
            }
        }
    }

    /// Returns the only member of a store that `S` keeps on one node, after the checks of [`Members::check`].
    ///
    /// # Errors
    /// One of the checks failed, or the store has several members.
    pub fn one_of<S: System>(&self, fabric: &impl Fabric) -> Result<(NodeId, &Store), StoreError> {
        self.check::<S>(fabric)?;
        let store = self.store();
        if self.list.len() > 1 {
            return Err(StoreError::Gone(format!(
                "store '{}' has {} members, and this client of a {} store uses one: create the store with --members 1",
                store.name,
                self.list.len(),
                S::KIND
            )));
        }
        Ok((self.list[self.first].node, store))
    }
}

/// Returns the bytes of a buffer that holds `len` bytes, including the node's state for that buffer.
pub(crate) fn buffer_bytes(len: usize) -> u64 {
    const STATE_SIZE: u64 = 16;
    u64::from(Class::for_len(len).expect("an item is no longer than the longest buffer").size) + STATE_SIZE
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::pilaf::service::PilafKind;
    use crate::registry::{ALL, OneKv};
    use farside_remote::control::MemberId;
    use farside_remote::fabric::ServiceId;
    use farside_remote::{Addr, Chain, Key, Reply};
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};
    use std::time::Duration;

    /// A fabric that has these capabilities. Tests must not send requests over it.
    struct Bare(Capabilities);

    impl Fabric for Bare {
        async fn run(&self, _: NodeId, _: &Chain<'_>, _: &mut Reply) -> Result<(), FabricError> {
            unreachable!("the fabric is not used")
        }

        async fn call(&self, _: NodeId, _: ServiceId, _: &[u8], _: &mut Vec<u8>) -> Result<(), FabricError> {
            unreachable!("the fabric is not used")
        }

        fn retire(&self, _: NodeId, _: Key, _: Addr) {}

        fn capabilities(&self, _: NodeId) -> Capabilities {
            self.0
        }
    }

    impl Clock for Bare {
        fn now(&self) -> Duration {
            Duration::ZERO
        }

        fn wall(&self) -> Duration {
            Duration::ZERO
        }

        async fn sleep(&self, _: Duration) {}
    }

    fn opened(kind: &str, has: Capabilities) -> Result<(), StoreError> {
        let (members, options) = (Members::one(NodeId(3), store(kind)), Options::default());
        at_once(OneKv::of(Bare(has), &members, &options)).map(drop)
    }

    fn store(kind: &str) -> Store {
        Store {
            name: "s".into(),
            kind: kind.into(),
            parameters: r#"{"slots":64,"seed":1,"placement":"hashed","epoch":1}"#.into(),
            quota: 4 << 20,
            incarnation: 1,
            region: 1,
            secret: 1,
            table_at: 1 << 20,
            table_len: 1 << 20,
            wide: false,
            created: 0,
            id: 1,
            former: None,
            membership: None,
        }
    }

    #[test]
    fn a_store_with_a_wiped_member_is_not_whole() {
        let ids = (0..3).map(|node| MemberId { node, incarnation: node.into() }).collect();
        let (attempt, state) = ([1, 2], MemberState::Committed);
        let membership = Membership { attempt, state, index: 0, configuration: 1, members: ids };
        let here = Store { membership: Some(membership), ..store("index") };
        let away = FabricError::NodeDied(NodeId(1));
        let lost = StoreError::MemoryLost { name: "s".into(), member: 2, node: NodeId(2), loss: Loss::Items };
        let member = |node, store| Member { node: NodeId(node), session: 0, store };
        let of = |list: Vec<Member>| Members::of(list, 3).expect("a member has a description");
        let all = of((0..3).map(|node| member(node, Ok(here.clone()))).collect());
        assert_eq!(all.whole().map(|whole| whole.len()), Ok(3));
        let with_two_errors = of(vec![
            member(0, Ok(here.clone())),
            member(1, Err(StoreError::Fabric(away))),
            member(2, Err(lost.clone())),
        ]);
        assert_eq!(with_two_errors.whole().err(), Some(lost));
        assert!(of(vec![member(0, Ok(here))]).whole().is_err(), "two members are missing");
    }

    /// Returns the output of a future that never waits.
    fn at_once<T>(future: impl Future<Output = T>) -> T {
        match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(output) => output,
            Poll::Pending => unreachable!("the future never waits"),
        }
    }

    #[test]
    fn a_fabric_without_a_needed_capability_is_refused_with_its_name() {
        let lacks = |kind, has| opened(kind, has).expect_err("a capability is missing").to_string();
        let message = lacks("pilaf", Capabilities::NONE);
        assert!(message.contains("pilaf stores need a fabric with calls"), "{message}");
        assert!(message.contains("the one to node 3 lacks calls (it has: none)"), "{message}");
        let message = lacks("prism-kv", Capabilities::CALLS.and(Capabilities::CONDITIONAL_OPS));
        assert!(message.contains("lacks masked CAS (it has: calls, conditional ops)"), "{message}");
        assert_eq!(opened("prism-kv", Capabilities::SOFTWARE), Ok(()));
        assert!(ALL.iter().all(|system| Capabilities::SOFTWARE.contains(system.needs)));
    }

    #[test]
    fn a_missing_capability_is_refused_before_the_node_is_called() {
        let opening = open::<PilafKind, Bare>(Bare(Capabilities::NONE), NodeId(3), "s");
        let message = at_once(opening).err().expect("calls are missing").to_string();
        assert!(message.contains("pilaf stores need a fabric with calls"), "{message}");
    }

    #[test]
    fn a_store_of_another_family_or_release_is_refused_with_its_kind() {
        let message = opened("raw", Capabilities::SOFTWARE).expect_err("no keys").to_string();
        assert_eq!(message, "store 's' is plain memory, not a key-value store: name another store");
        let message = opened("cuckoo", Capabilities::SOFTWARE).expect_err("not known").to_string();
        assert!(
            message.starts_with("store 's' is of kind 'cuckoo', which this release does not support"),
            "{message}"
        );
    }
}
