//! The sessions with the nodes of a store, and the keys that the nodes have granted in them.
//!
//! A pool opens the session after a lost one by itself, and binds it to the client's nonce. A node grants keys for one
//! session only. So before an operation, the client fetches the keys of the members with whose nodes it has another
//! session by now. A chain or a call with a former key is not sent, as if the node could not be reached. That includes
//! a chain whose task waits for a free buffer while another task fetches the keys.
//!
//! Invariant: no chain and no call to a store is sent over a session in which its key was not granted.

use crate::members::fetch_member;
use crate::store::{Members, StoreError};
use farside_remote::clock::Clock;
use farside_remote::fabric::ServiceId;
use farside_remote::service::addressed;
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};
use std::cell::Cell;
use std::time::Duration;

/// Fabric of a client whose chains have the keys of one store.
pub(crate) struct Keyed<F> {
    inner: F,
    members: Members,
    granted: Box<[Granted]>,
}

/// The key of a member.
struct Granted {
    node: NodeId,
    /// Number of the session in which the node has granted the key.
    session: Cell<u64>,
    /// `None` if the member did not answer when the store was opened.
    key: Cell<Option<Key>>,
}

impl<F: Fabric> Keyed<F> {
    /// Creates the fabric of a client that has the keys of these members.
    pub(crate) fn new(inner: F, members: &Members) -> Keyed<F> {
        let granted = members.list().iter().map(|member| {
            let key = member.store.as_ref().ok().map(|store| store.extent().key);
            Granted { node: member.node, session: Cell::new(member.session), key: Cell::new(key) }
        });
        Keyed { granted: granted.collect(), members: members.clone(), inner }
    }

    /// Fetches the keys of those of the first `members` members with whose nodes there is another session. Calls
    /// `granted` with the index and the key of each.
    ///
    /// # Errors
    /// [`StoreError`]: a node does not answer, its member has lost its memory, or the store was dropped. The member's
    /// key is outdated.
    #[inline]
    pub(crate) async fn fetch_keys(
        &self,
        members: usize,
        granted: impl Fn(usize, Key),
    ) -> Result<(), StoreError> {
        for (index, of) in self.granted.iter().enumerate().take(members) {
            if !self.is_current(of) {
                // Boxed: the future of each operation would be as large otherwise.
                let part = Box::pin(fetch_member(&self.inner, &self.members, index)).await?;
                let key = part.store().extent().key;
                granted(index, key);
                of.key.set(Some(key));
                of.session.set(part.list()[0].session);
            }
        }
        Ok(())
    }

    /// Forgets the key of a member that has refused it, so that it is fetched before the next operation, or the reason
    /// is found why there is none.
    #[cold]
    pub(crate) fn forget(&self, node: NodeId) {
        self.granted.iter().filter(|of| of.node == node).for_each(|of| of.key.set(None));
    }

    /// Whether the client has a key of the current session.
    fn is_current(&self, granted: &Granted) -> bool {
        granted.key.get().is_some() && self.inner.session_number(granted.node) == granted.session.get()
    }

    /// Whether the node has granted `key` in the current session.
    #[inline]
    fn is_granted(&self, granted: &Granted, key: Key) -> bool {
        self.is_current(granted) && granted.key.get() == Some(key)
    }

    /// Whether the node has a member of the store and has not granted `key` in the current session.
    #[inline]
    fn is_outdated(&self, node: NodeId, key: Key) -> bool {
        let mut of_node = self.granted.iter().filter(|granted| granted.node == node).peekable();
        of_node.peek().is_some() && !of_node.any(|granted| self.is_granted(granted, key))
    }
}

impl<F: Fabric> Fabric for Keyed<F> {
    #[inline]
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        // The fabric takes its session with the node when it is polled for the first time, so it is this one.
        match self.is_outdated(node, chain.key()) {
            true => Err(outdated(node)),
            false => self.inner.run(node, chain, reply).await,
        }
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        // A call to the node itself has no key.
        let key = if service == ServiceId::NODE { None } else { addressed(service, request).ok() };
        match key.is_some_and(|(key, _)| self.is_outdated(node, key)) {
            true => Err(outdated(node)),
            false => self.inner.call(node, service, request, answer).await,
        }
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        self.inner.retire(node, key, buffer);
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        self.inner.capabilities(node)
    }

    fn session_number(&self, node: NodeId) -> u64 {
        self.inner.session_number(node)
    }

    fn may_run_abandoned(&self, node: NodeId) -> bool {
        self.inner.may_run_abandoned(node)
    }
}

impl<F: Clock> Clock for Keyed<F> {
    fn now(&self) -> Duration {
        self.inner.now()
    }

    fn wall(&self) -> Duration {
        self.inner.wall()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        self.inner.sleep(duration)
    }
}

#[cold]
fn outdated(node: NodeId) -> FabricError {
    let reason = "the session was opened again, and the request has the store's key of a former one";
    FabricError::Unreachable { node, reason: reason.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farside_remote::control::{Answer, Store};
    use farside_remote::fabric::Ran;
    use farside_remote::service::address;
    use farside_remote::{ChainBuf, read};
    use std::cell::RefCell;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    const NODE: NodeId = NodeId(3);

    /// A node that grants another key in each session, and records the keys of its chains and of calls to its store.
    #[derive(Default)]
    struct Node {
        session: Cell<u64>,
        keys: RefCell<Vec<Key>>,
    }

    impl Node {
        fn granted(&self) -> Store {
            Store {
                name: "s".into(),
                kind: "test".into(),
                parameters: String::new(),
                quota: 0,
                incarnation: 1,
                region: 1,
                secret: 100 + self.session.get(),
                table_at: 1 << 20,
                table_len: 1 << 20,
                wide: false,
                created: 0,
                id: 1,
                former: None,
                membership: None,
            }
        }
    }

    impl Fabric for &Node {
        async fn run(&self, _: NodeId, chain: &Chain<'_>, _: &mut Reply) -> Result<(), FabricError> {
            self.keys.borrow_mut().push(chain.key());
            Ok(())
        }

        async fn call(
            &self,
            _: NodeId,
            service: ServiceId,
            request: &[u8],
            answer: &mut Vec<u8>,
        ) -> Result<(), FabricError> {
            if service != ServiceId::NODE {
                self.keys.borrow_mut().push(addressed(service, request).expect("it has a key").0);
                return Ok(());
            }
            *answer = serde_json::to_vec(&Answer::Store(self.granted())).expect("plain data");
            Ok(())
        }

        fn retire(&self, _: NodeId, _: Key, _: Addr) {}

        fn capabilities(&self, _: NodeId) -> Capabilities {
            Capabilities::NONE
        }

        fn session_number(&self, _: NodeId) -> u64 {
            self.session.get()
        }
    }

    /// Returns the output of a future that never waits.
    fn at_once<T>(future: impl Future<Output = T>) -> T {
        match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(output) => output,
            Poll::Pending => unreachable!("the future never waits"),
        }
    }

    #[test]
    fn a_chain_with_a_key_of_a_former_session_is_never_sent() {
        let node = Node::default();
        let keyed = Keyed::new(&node, &Members::granted(NODE, 0, node.granted()));
        let key = Cell::new(node.granted().extent().key);
        let run = |chain: &Chain<'_>| at_once(keyed.run(NODE, chain, &mut Reply::new()));
        let fetch = || at_once(keyed.fetch_keys(1, |_, granted| key.set(granted)));
        let (mut buffer, mut other) = (ChainBuf::new(), ChainBuf::new());
        let first = key.get();
        let mut chain = buffer.begin(first);
        chain.also(read(Addr::new(1 << 20), 8));
        assert_eq!((run(&chain), node.keys.take()), (Ok(()), vec![first]));

        // The task of the chain waits before it sends the chain again. Meanwhile the session is opened again.
        node.session.set(1);
        let refused = run(&chain).expect_err("the key was not fetched");
        assert_eq!((refused.ran(), node.keys.take()), (Ran::No, vec![]));
        // Another task fetches the key. The chain still has the former one.
        assert_eq!(fetch(), Ok(()));
        assert_ne!(key.get(), first);
        let refused = run(&chain).expect_err("the node has granted another key");
        assert_eq!((refused.ran(), node.keys.take()), (Ran::No, vec![]));
        let mut chain = other.begin(key.get());
        chain.also(read(Addr::new(1 << 20), 8));
        assert_eq!((run(&chain), node.keys.take()), (Ok(()), vec![key.get()]));
    }

    #[test]
    fn a_call_with_a_key_of_a_former_session_is_never_sent() {
        let node = Node::default();
        let keyed = Keyed::new(&node, &Members::granted(NODE, 0, node.granted()));
        let call = |key: Key| {
            let mut request = Vec::new();
            let service = address(key, &mut request);
            at_once(keyed.call(NODE, service, &request, &mut Vec::new()))
        };
        let first = node.granted().extent().key;
        assert_eq!((call(first), node.keys.take()), (Ok(()), vec![first]));
        node.session.set(1);
        let next = node.granted().extent().key;
        for key in [first, next] {
            let refused = call(key).expect_err("the key was not fetched");
            assert_eq!((refused.ran(), node.keys.take()), (Ran::No, vec![]));
        }
        assert_eq!(at_once(keyed.fetch_keys(1, |_, _| ())), Ok(()));
        let refused = call(first).expect_err("the node has granted another key");
        assert_eq!((refused.ran(), node.keys.take()), (Ran::No, vec![]));
        assert_eq!((call(next), node.keys.take()), (Ok(()), vec![next]));
    }
}
