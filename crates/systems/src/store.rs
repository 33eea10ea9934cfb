//! Opens stores: fetches a store's description from the catalog and checks that the client can use the store.
//!
//! Invariant: no function of this module changes a store, so every error means that nothing was changed.

use crate::registry::{Registered, named};
use crate::system::{Family, Options, System};
use farside_remote::arena::class::Class;
use farside_remote::clock::Clock;
use farside_remote::control::{Answer, Ask, MemberState, Membership, Store};
use farside_remote::fabric::{Ran, ServiceId};
use farside_remote::{Capabilities, Fabric, FabricError, NodeId};

/// Reason why a store was not opened. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreError {
    /// The catalog has no such store, or has another store under its name.
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
    },
    /// Another client is creating the store.
    BeingCreated {
        /// Name of the store.
        name: String,
    },
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
                "a {kind} store needs a fabric with {needs}, and the one to node {} lacks {} (it has: {has}): nothing \
                 was changed; reach the node by another fabric, or use a store of another kind",
                node.0,
                needs.without(*has)
            ),
            StoreError::Fabric(error) => error.fmt(f),
            StoreError::MemoryLost { name, member, node } => write!(
                f,
                "store '{name}' has lost the memory of its member {member} at node {}, with all items in it: drop the \
                 store with 'farside store drop {name}', then create and load it again",
                node.0
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
    let request = serde_json::to_vec(&Ask::OpenStore { name: name.to_owned() }).expect("plain data");
    let mut answer = Vec::new();
    fabric.call(node, ServiceId::NODE, &request, &mut answer).await.map_err(|error| match error {
        FabricError::Refused(reason) => StoreError::Gone(reason),
        other => StoreError::Fabric(other.map_ran(|_| Ran::No)),
    })?;
    match serde_json::from_slice(&answer) {
        Ok(Answer::Store(store)) if is_sound(&store, name) => Ok(store),
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
    /// Creates the members of a store that lies on one node.
    pub fn one(node: NodeId, store: Store) -> Members {
        Members { list: vec![Member { node, store: Ok(store) }], first: 0, nodes: 1 }
    }

    /// Creates the members of the part of a store that lies on one of its nodes, as if the part were a whole store.
    pub(crate) fn part(node: NodeId, store: Store) -> Members {
        Members::one(node, Store { membership: None, ..store })
    }

    /// Creates the members of a store in a pool of `nodes` nodes from its complete list.
    ///
    /// # Errors
    /// No member has a description: the error of the first.
    pub(crate) fn of(list: Vec<Member>, nodes: u32) -> Result<Members, StoreError> {
        match list.iter().position(|member| member.store.is_ok()) {
            Some(first) => Ok(Members { list, first, nodes }),
            None => Err(list.into_iter().find_map(|member| member.store.err()).unwrap_or_else(|| {
                StoreError::Gone("the store has no member: create it with 'farside store create'".into())
            })),
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

        async fn sleep(&self, _: Duration) {}
    }

    fn opened(kind: &str, has: Capabilities) -> Result<(), StoreError> {
        let store = Store {
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
            id: 1,
            former: None,
            membership: None,
        };
        let (members, options) = (Members::one(NodeId(3), store), Options::default());
        at_once(OneKv::of(Bare(has), &members, &options)).map(drop)
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
        assert!(message.contains("a pilaf store needs a fabric with calls"), "{message}");
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
        assert!(message.contains("a pilaf store needs a fabric with calls"), "{message}");
    }

    #[test]
    fn a_store_of_another_family_or_release_is_refused_with_its_kind() {
        let message = opened("raw", Capabilities::SOFTWARE).expect_err("no keys").to_string();
        assert_eq!(message, "store 's' is plain memory and holds no keys: name another store");
        let message = opened("cuckoo", Capabilities::SOFTWARE).expect_err("not known").to_string();
        assert!(
            message.starts_with("store 's' is of kind 'cuckoo', which this release does not support"),
            "{message}"
        );
    }
}
