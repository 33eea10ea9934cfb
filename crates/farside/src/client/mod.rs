//! A client for ordinary programs: any thread or task may use it, and a thread of its own runs the operations.
//!
//! Invariant: every submitted operation completes. If the client's thread exits, operations complete with
//! [`Error::Closed`].
//! Invariant: after the session is over, the next submitted operation opens another session.

mod pending;

pub use pending::Pending;

use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::pool::Pool;
use crate::reopen::{Opened, is_over, may_retry, not_opened};
use farside_fabrics::executor::{Core, block_on};
use farside_systems::kv::{AnyKv, Conflict, Item, Kv, KvError, Version};
use farside_systems::system::Options;
use pending::{Promise, promise};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// A value and its version, as returned by [`Client::get`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    /// Bytes of the value.
    pub value: Vec<u8>,
    /// Version of the key at which this value was installed. Pass it to [`Client::compare_and_put`].
    pub version: Version,
}

/// Maximum number of operations in flight; further operations wait in the queue.
const TASKS: usize = 32;

/// A client of one store, returned by [`Pool::open`].
///
/// A client has one session and one thread, which runs its operations. Clones share both; cloning is cheap. Each method
/// submits an operation and returns a [`Pending`] at once. Wait for it with [`Pending::wait`], or `.await` it under any
/// executor.
///
/// * Up to 32 operations are in flight. Further ones wait in a queue and start in the order of submission.
/// * Operations in flight at the same time take effect in any order. An operation that is submitted after another one
///   has completed takes effect after that one, also across clients, processes and hosts.
/// * If the session is over and an operation was not carried out, the client opens another session and retries the
///   operation once. It never retries an operation that may have been carried out.
/// * When the last clone is dropped, the thread completes the submitted operations and exits. A program that exits
///   earlier may lose them: wait for the last `put` before `main` returns.
///
/// # Errors
/// Every [`Pending`] completes with a result or an [`Error`], whose [`Error::ran`] tells whether the operation was
/// carried out. Errors that every operation can have:
///
/// * [`Error::Kv`] with [`KvError::KeyLength`] or [`KvError::ValueLength`]: a key has 1 to
///   [`KEY_MAX`](crate::KEY_MAX) bytes, a value at most [`VALUE_MAX`](crate::VALUE_MAX). No node received anything.
/// * [`Error::Kv`] with [`KvError::Fabric`]: no response arrived in time, or the session is over.
/// * [`Error::Closed`]: the client's thread has exited; the operation may have been carried out.
///
/// # Example
///
/// ```
/// # fn main() -> Result<(), farside::Error> {
/// let kv = farside::connect("local:64MiB")?.open("default")?; // a node in this process
/// let puts: Vec<_> = (0..100).map(|n| kv.put(format!("key {n}"), "x")).collect(); // in flight together
/// puts.into_iter().try_for_each(|put| put.wait())?;
/// let found = kv.get("key 7").wait()?.expect("it was just stored");
/// assert_eq!(found.value, b"x");
/// assert!(kv.delete("key 7").wait()?);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Client {
    queue: Arc<Handle>,
}

impl Client {
    pub(crate) fn start(pool: Pool, name: &str) -> Result<Client, Error> {
        let queue = Arc::new(Queue::default());
        let threads_queue = Arc::clone(&queue);
        let name = name.to_owned();
        let (ready, opened) = mpsc::channel();
        std::thread::Builder::new()
            .name("farside-client".into())
            .spawn(move || run(&pool, &name, &threads_queue, &ready))
            .map_err(Error::Thread)?;
        opened.recv().unwrap_or(Err(Error::Closed))?;
        Ok(Client { queue: Arc::new(Handle(queue)) })
    }

    /// Returns the value of `key` and its version, or `None` if the key has no value. Changes nothing.
    pub fn get(&self, key: impl Into<Vec<u8>>) -> Pending<Option<Value>> {
        let key = key.into();
        self.submit(|done| Request::Get { key, done })
    }

    /// Stores `value` under `key`, whether or not the key has a value.
    pub fn put(&self, key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> Pending<()> {
        let (key, value) = (key.into(), value.into());
        self.submit(|done| Request::Put { key, value, done })
    }

    /// Deletes the value of `key`; returns whether the key had one.
    pub fn delete(&self, key: impl Into<Vec<u8>>) -> Pending<bool> {
        let key = key.into();
        self.submit(|done| Request::Delete { key, done })
    }

    /// Stores `value` under `key` if the key has no value; returns whether `value` was stored. Only PRISM-KV stores
    /// support this operation.
    pub fn put_if_absent(&self, key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> Pending<bool> {
        let (key, value) = (key.into(), value.into());
        self.submit(|done| Request::PutIfAbsent { key, value, done })
    }

    /// Replaces the value of `key` if the key still has the version `expected`, as returned by [`Client::get`]. Returns
    /// the new version. Otherwise stores nothing and returns a [`Conflict`] with the key's version, if the key has a
    /// value. Only PRISM-KV stores support this operation.
    ///
    /// # Example
    ///
    /// ```
    /// # fn main() -> Result<(), farside::Error> {
    /// # let kv = farside::connect("local:64MiB")?.open("default")?;
    /// kv.put("counter", "1").wait()?;
    /// let found = kv.get("counter").wait()?.expect("it was just stored");
    /// kv.put("counter", "5").wait()?; // another client is faster
    /// let outcome = kv.compare_and_put("counter", found.version, "2").wait()?;
    /// assert!(outcome.is_err(), "nothing was stored: read again and retry");
    /// # Ok(())
    /// # }
    /// ```
    pub fn compare_and_put(
        &self,
        key: impl Into<Vec<u8>>,
        expected: Version,
        value: impl Into<Vec<u8>>,
    ) -> Pending<Result<Version, Conflict>> {
        let (key, value) = (key.into(), value.into());
        self.submit(|done| Request::CompareAndPut { key, expected, value, done })
    }

    /// Returns the values of several keys, in the order of the keys. Changes nothing. The result is not a snapshot: the
    /// keys are read at different instants.
    ///
    /// The call counts as one operation in the queue. One round trip reads up to 64 keys whose values fit into one
    /// reply (64 KiB). Only PRISM-KV stores support this operation.
    pub fn get_many<K: Into<Vec<u8>>>(
        &self,
        keys: impl IntoIterator<Item = K>,
    ) -> Pending<Vec<Option<Value>>> {
        let keys = keys.into_iter().map(Into::into).collect();
        self.submit(|done| Request::GetMany { keys, done })
    }

    /// Stores the values of several keys. Each key is a separate put, and different keys are stored in any order. If a
    /// key occurs twice, the later value stays.
    ///
    /// The call counts as one operation in the queue. Two round trips store as many keys as fit into one chain (16
    /// keys, 56 KiB). Only PRISM-KV stores support this operation.
    ///
    /// After an error whose [`Error::ran`] is [`Ran::No`](crate::Ran::No), no key was stored. After any other error,
    /// any of the keys may have been stored.
    pub fn put_many<K: Into<Vec<u8>>, V: Into<Vec<u8>>>(
        &self,
        items: impl IntoIterator<Item = (K, V)>,
    ) -> Pending<()> {
        let items = items.into_iter().map(|(key, value)| (key.into(), value.into())).collect();
        self.submit(|done| Request::PutMany { items, done })
    }

    fn submit<T>(&self, request: impl FnOnce(Promise<T>) -> Request) -> Pending<T> {
        let (done, pending) = promise();
        self.queue.0.push(request(done));
        pending
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").finish_non_exhaustive()
    }
}

/// Handle of the queue. All clones of a client share one handle, which closes the queue when the last clone is dropped.
struct Handle(Arc<Queue>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.close();
    }
}

enum Request {
    Get {
        key: Vec<u8>,
        done: Promise<Option<Value>>,
    },
    Put {
        key: Vec<u8>,
        value: Vec<u8>,
        done: Promise<()>,
    },
    Delete {
        key: Vec<u8>,
        done: Promise<bool>,
    },
    PutIfAbsent {
        key: Vec<u8>,
        value: Vec<u8>,
        done: Promise<bool>,
    },
    CompareAndPut {
        key: Vec<u8>,
        expected: Version,
        value: Vec<u8>,
        done: Promise<Result<Version, Conflict>>,
    },
    GetMany {
        keys: Vec<Vec<u8>>,
        done: Promise<Vec<Option<Value>>>,
    },
    PutMany {
        items: Vec<(Vec<u8>, Vec<u8>)>,
        done: Promise<()>,
    },
}

/// Operations that were submitted and not started.
#[derive(Default)]
struct Queue {
    inner: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    requests: VecDeque<Request>,
    /// Wakers of tasks that wait for a request.
    idle: Vec<Waker>,
    closed: bool,
}

impl Queue {
    fn inner(&self) -> MutexGuard<'_, Waiting> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a request. A closed queue drops it, which completes it with [`Error::Closed`].
    fn push(&self, request: Request) {
        let mut inner = self.inner();
        if !inner.closed {
            inner.requests.push_back(request);
            let idle = inner.idle.pop();
            drop(inner);
            idle.into_iter().for_each(Waker::wake);
        }
    }

    fn close(&self) {
        let mut inner = self.inner();
        inner.closed = true;
        let idle = std::mem::take(&mut inner.idle);
        drop(inner);
        idle.into_iter().for_each(Waker::wake);
    }

    fn take_all(&self) -> VecDeque<Request> {
        std::mem::take(&mut self.inner().requests)
    }

    /// Wakes all tasks that wait in [`Queue::pop`], so that they notice that `ends` is set.
    fn wake_idle(&self) {
        let idle = std::mem::take(&mut self.inner().idle);
        idle.into_iter().for_each(Waker::wake);
    }

    /// Waits for the next request. Returns `None` once the queue is closed and empty, or `ends` is set.
    async fn pop(&self, ends: &Cell<bool>) -> Option<Request> {
        std::future::poll_fn(|cx| {
            if ends.get() {
                return Poll::Ready(None);
            }
            let mut inner = self.inner();
            if let Some(request) = inner.requests.pop_front() {
                return Poll::Ready(Some(request));
            }
            if inner.closed {
                return Poll::Ready(None);
            }
            inner.idle.push(cx.waker().clone());
            Poll::Pending
        })
        .await
    }
}

/// Guard that closes and clears the queue when the client's thread exits, also by a panic, so that no caller waits
/// forever.
struct CloseAtEnd<'a>(&'a Queue);

impl Drop for CloseAtEnd<'_> {
    fn drop(&mut self) {
        self.0.close();
        self.0.inner().requests.clear();
    }
}

/// Runs on the client's thread. Its tasks take requests from the queue until the session is over; then the thread opens
/// another session.
fn run(pool: &Pool, name: &str, queue: &Queue, ready: &mpsc::Sender<Result<(), Error>>) {
    let _closes = CloseAtEnd(queue);
    let mut opened = match Opened::new(pool, name, TASKS, &Options::default()) {
        Ok(opened) => opened,
        Err(error) => return drop(ready.send(Err(error))),
    };
    if ready.send(Ok(())).is_err() {
        return;
    }
    let store = opened.kvs[0].store().clone();
    let mut retries = Vec::new();
    loop {
        let Some(left) = serve_all(opened, queue, retries) else { return };
        retries = left;
        opened = loop {
            if retries.is_empty() {
                let Some(request) = block_on((), queue.pop(&Cell::new(false))) else { return };
                retries.push(request);
            }
            match Opened::reopen(pool, &store, TASKS, &Options::default()) {
                Ok(opened) => break opened,
                Err(error) => {
                    // Queued requests fail too: each would otherwise wait for a connection attempt of its own.
                    let error = not_opened(&error);
                    let waiting = queue.take_all();
                    retries.drain(..).chain(waiting).for_each(|request| request.fail(error.clone()));
                }
            }
        };
    }
}

/// Serves requests, `retries` first, until the session is over. Returns the requests to retry over another session, or
/// `None` once the queue is closed and empty.
fn serve_all(opened: Opened, queue: &Queue, retries: Vec<Request>) -> Option<Vec<Request>> {
    let Opened { endpoint, kvs, .. } = opened;
    // Of several nodes, each gets its next session in the background, and the store's client waits for it.
    let has_one_session = endpoint.nodes() == 1;
    let (retries, left) = (RefCell::new(retries), RefCell::new(Vec::new()));
    let is_over = Cell::new(false);
    let mut core = Core::new(&endpoint);
    for mut kv in kvs {
        let (retries, left, is_over) = (&retries, &left, &is_over);
        core.spawn(async move {
            loop {
                // A request is retried once: its second outcome is final.
                let second = retries.borrow_mut().pop();
                let may_return = second.is_none() && has_one_session;
                let request = match second {
                    Some(request) => request,
                    None => match queue.pop(is_over).await {
                        Some(request) => request,
                        None => return,
                    },
                };
                let served = serve(&mut kv, request, may_return).await;
                if has_one_session && !matches!(served, Served::Completed) {
                    is_over.set(true);
                    queue.wake_idle();
                }
                if let Served::Returned(request) = served {
                    left.borrow_mut().push(request);
                }
            }
        });
    }
    core.run();
    drop(core);
    is_over.get().then(|| left.into_inner())
}

/// Outcome of an attempt to serve a request.
enum Served {
    /// The request is completed.
    Completed,
    /// The request is completed, and the session is over.
    Over,
    /// The session is over, and the request was not carried out.
    Returned(Request),
}

async fn serve(kv: &mut AnyKv<Rc<Endpoint>>, request: Request, may_return: bool) -> Served {
    let returns = |error: &KvError| may_return && may_retry(error);
    match request {
        Request::Get { key, done } => match kv.get(&key).await.map(|item| item.map(owned)) {
            Err(error) if returns(&error) => Served::Returned(Request::Get { key, done }),
            got => done.complete(got),
        },
        Request::Put { key, value, done } => match kv.put(&key, &value).await {
            Err(error) if returns(&error) => Served::Returned(Request::Put { key, value, done }),
            put => done.complete(put),
        },
        Request::Delete { key, done } => match kv.delete(&key).await {
            Err(error) if returns(&error) => Served::Returned(Request::Delete { key, done }),
            deleted => done.complete(deleted),
        },
        Request::PutIfAbsent { key, value, done } => match kv.put_if_absent(&key, &value).await {
            Err(error) if returns(&error) => Served::Returned(Request::PutIfAbsent { key, value, done }),
            put => done.complete(put),
        },
        Request::CompareAndPut { key, expected, value, done } => {
            match kv.compare_and_put(&key, expected, &value).await {
                Err(error) if returns(&error) => {
                    Served::Returned(Request::CompareAndPut { key, expected, value, done })
                }
                put => done.complete(put),
            }
        }
        Request::GetMany { keys, done } => match get_many(kv, &keys).await {
            Err(error) if returns(&error) => Served::Returned(Request::GetMany { keys, done }),
            got => done.complete(got),
        },
        Request::PutMany { items, done } => match put_many(kv, &items).await {
            Err(error) if returns(&error) => Served::Returned(Request::PutMany { items, done }),
            put => done.complete(put),
        },
    }
}

fn owned(item: Item<'_>) -> Value {
    Value { value: item.value.to_vec(), version: item.version }
}

async fn get_many(kv: &mut AnyKv<Rc<Endpoint>>, keys: &[Vec<u8>]) -> Result<Vec<Option<Value>>, KvError> {
    let mut values = vec![None; keys.len()];
    let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    let visit = |place: usize, item: Option<Item<'_>>| values[place] = item.map(owned);
    kv.get_many(&keys, visit).await?;
    Ok(values)
}

async fn put_many(kv: &mut AnyKv<Rc<Endpoint>>, items: &[(Vec<u8>, Vec<u8>)]) -> Result<(), KvError> {
    let items: Vec<(&[u8], &[u8])> = items.iter().map(|(key, value)| (&key[..], &value[..])).collect();
    kv.put_many(&items).await
}

impl Request {
    /// Completes the request with an error.
    fn fail(self, error: KvError) {
        let error = Error::Kv(error);
        match self {
            Request::Get { done, .. } => done.fulfil(Err(error)),
            Request::Put { done, .. } | Request::PutMany { done, .. } => done.fulfil(Err(error)),
            Request::Delete { done, .. } | Request::PutIfAbsent { done, .. } => done.fulfil(Err(error)),
            Request::CompareAndPut { done, .. } => done.fulfil(Err(error)),
            Request::GetMany { done, .. } => done.fulfil(Err(error)),
        }
    }
}

impl<T> Promise<T> {
    fn complete(self, result: Result<T, KvError>) -> Served {
        let served = match &result {
            Err(error) if is_over(error) => Served::Over,
            _ => Served::Completed,
        };
        self.fulfil(result.map_err(Error::Kv));
        served
    }
}
