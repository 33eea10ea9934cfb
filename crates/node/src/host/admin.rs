//! The admin server, which people and monitoring systems query over HTTP. Operations on stores never use this server.
//!
//! `GET /health` and `GET /stores` return JSON, `GET /metrics` OpenMetrics. One-sided clients count their own
//! operations in their session slots; the metrics sum these counters.
//! Invariant: no response contains a key's secret or an address.
//! Invariant: HTTP clients hold at most [`CONNECTIONS_MAX`] of the node's descriptors, none idle for longer than
//! [`IDLE_MAX`].

use super::clients::BindError;
use super::{Host, Shared};
use crate::identity::Sender;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use farside_fabrics::session::Counters;
use farside_remote::control::{Answer, Ask};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::Pin;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, ready};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, Sleep};

/// Options of the admin server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admin {
    /// Address to listen at. A token is required unless it is a loopback address.
    pub listen: SocketAddr,
    /// Token that a client must send as `Authorization: Bearer TOKEN`.
    pub token: Option<String>,
}

/// The thread of the admin server. The thread stops when this value is dropped.
pub(super) struct Server {
    at: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

const DRAIN: Duration = Duration::from_millis(100);
const ANSWER_WAIT: Duration = Duration::from_secs(1);
/// Maximum number of concurrent connections. Further clients wait in the system's queue, without a descriptor of the
/// node.
const CONNECTIONS_MAX: usize = 32;
/// Maximum time for a client to send a whole request, or to accept the next part of the response.
const IDLE_MAX: Duration = Duration::from_secs(5);

#[derive(Clone)]
struct AppState {
    shared: Arc<Shared>,
    token: Option<Arc<str>>,
}

impl Server {
    pub(super) fn start(shared: Arc<Shared>, admin: &Admin) -> Result<Server, BindError> {
        if !admin.listen.ip().is_loopback() && admin.token.is_none() {
            return Err(BindError::NoToken(admin.listen));
        }
        let refused = |error| BindError::Admin(admin.listen, error);
        let listener = TcpListener::bind(admin.listen).map_err(refused)?;
        listener.set_nonblocking(true).map_err(refused)?;
        let at = listener.local_addr().map_err(refused)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(refused)?;
        let app = AppState { shared, token: admin.token.as_deref().map(Arc::from) };
        let (stop, stopped) = oneshot::channel();
        let serve = async move {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            let listener = Bounded { listener, free: Arc::new(Semaphore::new(CONNECTIONS_MAX)) };
            // Requests in flight get a short time to finish, so that a slow connection does not delay the shutdown for
            // long.
            tokio::select! {
                served = axum::serve(listener, router(app)) => served,
                () = async {
                    stopped.await.unwrap_or(());
                    tokio::time::sleep(DRAIN).await;
                } => Ok(()),
            }
        };
        let thread = std::thread::Builder::new()
            .name("farside-admin".into())
            .spawn(move || {
                if let Err(error) = runtime.block_on(serve) {
                    tracing::error!(%error, "the admin server stopped");
                }
                runtime.shutdown_timeout(DRAIN);
            })
            .map_err(refused)?;
        Ok(Server { at, stop: Some(stop), thread: Some(thread) })
    }
}

impl Host {
    /// Address of the admin server, with the actual port if port 0 was requested.
    pub fn admin_at(&self) -> Option<SocketAddr> {
        self.admin.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(|server| server.at)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// A listener with a bounded number of concurrent connections.
struct Bounded {
    listener: tokio::net::TcpListener,
    free: Arc<Semaphore>,
}

impl axum::serve::Listener for Bounded {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        let place = Arc::clone(&self.free).acquire_owned().await.expect("the semaphore is never closed");
        let (stream, address) = axum::serve::Listener::accept(&mut self.listener).await;
        let idle = Box::pin(tokio::time::sleep(IDLE_MAX));
        (Connection { stream, idle, _place: place }, address)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection that fails once it was idle for [`IDLE_MAX`]. Only a write resets the timer, so that a request which
/// arrives byte by byte also times out.
struct Connection {
    stream: TcpStream,
    idle: Pin<Box<Sleep>>,
    _place: OwnedSemaphorePermit,
}

impl Connection {
    /// Returns `tried`, the outcome of a read or write, or an error if the outcome is pending and the time is up.
    fn in_time<T>(&mut self, context: &mut Context<'_>, tried: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if tried.is_ready() {
            return tried;
        }
        ready!(self.idle.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    fn wrote<T>(&mut self, context: &mut Context<'_>, tried: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if matches!(tried, Poll::Ready(Ok(_))) {
            self.idle.as_mut().reset(Instant::now() + IDLE_MAX);
        }
        self.in_time(context, tried)
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let tried = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.in_time(context, tried)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let tried = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.wrote(context, tried)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let tried = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.wrote(context, tried)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let tried = Pin::new(&mut self.stream).poll_flush(context);
        self.in_time(context, tried)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let tried = Pin::new(&mut self.stream).poll_shutdown(context);
        self.in_time(context, tried)
    }
}

fn router(app: AppState) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/stores", get(stores))
        .route("/metrics", get(metrics))
        .fallback(|| async { (StatusCode::NOT_FOUND, "use /health, /stores or /metrics\n") })
        .layer(axum::middleware::from_fn_with_state(app.clone(), authorize))
        .with_state(app)
}

async fn authorize(
    State(app): State<AppState>,
    request: axum::extract::Request,
    next: axum::middleware::Next,
) -> Response {
    if app.token.as_deref().is_none_or(|token| presents(request.headers(), token)) {
        return next.run(request).await;
    }
    let challenge = [(header::WWW_AUTHENTICATE, "Bearer")];
    (StatusCode::UNAUTHORIZED, challenge, "send 'Authorization: Bearer TOKEN'\n").into_response()
}

/// Whether the headers contain the token. The comparison takes the same time, whichever byte of a wrong token differs.
fn presents(headers: &HeaderMap, token: &str) -> bool {
    let sent = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes());
    // A scheme's name is case-insensitive (RFC 9110, 11.1).
    let Some((scheme, sent)) = sent.and_then(|value| value.split_at_checked(b"Bearer ".len())) else {
        return false;
    };
    if !scheme.eq_ignore_ascii_case(b"Bearer ") {
        return false;
    }
    let difference = sent.iter().zip(token.as_bytes()).fold(0, |all, (a, b)| all | (a ^ b));
    sent.len() == token.len() && difference == 0
}

async fn health(State(app): State<AppState>) -> Response {
    let stopped = app.shared.state().stopped.clone();
    let status = if stopped.is_empty() { "ok" } else { "memory waits for stopped processes" };
    Json(serde_json::json!({ "status": status, "stopped_pids": stopped })).into_response()
}

async fn stores(State(app): State<AppState>) -> Response {
    match ask(app, Ask::ListStores).await {
        Ok(Answer::Stores(stores)) => {
            let reported: Vec<_> = stores
                .into_iter()
                .map(|store| {
                    serde_json::json!({ "name": store.name, "kind": store.kind, "quota_bytes": store.quota })
                })
                .collect();
            Json(reported).into_response()
        }
        Ok(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, reason).into_response(),
    }
}

async fn ask(app: AppState, ask: Ask) -> Result<Answer, String> {
    let asked = tokio::task::spawn_blocking(move || app.shared.ask(Sender::Host, ask, ANSWER_WAIT)).await;
    asked.map_err(|error| error.to_string())?.map_err(|error| error.to_string())
}

async fn metrics(State(app): State<AppState>) -> Response {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Figures { shared: app.shared }));
    let mut text = String::new();
    match prometheus_client::encoding::text::encode(&mut text, &registry) {
        Ok(()) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(header::CONTENT_TYPE, kind)], text).into_response()
        }
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// Reads the node's metrics at the time of each HTTP request.
struct Figures {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Figures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Figures")
    }
}

impl Collector for Figures {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let state = self.shared.state();
        let info = state.node.info();
        let Ok(counted) = state.node.counters(&self.shared.memory);
        let stopped = state.stopped.len() as u64;
        let stores = state.node.catalog().iter().count() as u64;
        let served = state.node.catalog().iter();
        let served: Vec<_> =
            served.map(|entry| (entry.store.name.clone(), Arc::clone(&entry.served))).collect();
        drop(state);
        let (mut sessions, mut through) = (0, Counters::default());
        for mail in &self.shared.mails {
            let counted = mail.counted();
            sessions += counted.sessions;
            through.add(&counted.session);
        }
        let refused = self.shared.refusals();
        let mut counter = |name, help, unit: Option<&Unit>, value: u64| {
            let metric = ConstCounter::new(value);
            metric.encode(encoder.encode_descriptor(name, help, unit, metric.metric_type())?)
        };
        counter("farside_chains", "Chains run by clients", None, counted.chains)?;
        counter("farside_ops", "Operations in those chains", None, counted.ops)?;
        counter("farside_atomics", "CAS and FETCH-ADD requested", None, counted.atomics)?;
        counter("farside_request", "Wire size of the chains", Some(&Unit::Bytes), counted.bytes_in)?;
        counter("farside_reply", "Wire size of the replies", Some(&Unit::Bytes), counted.bytes_out)?;
        counter("farside_not_ready", "Chains that found no buffer", None, counted.not_ready)?;
        counter("farside_refused", "Chains refused for access or as invalid", None, counted.refused)?;
        counter("farside_retired_buffers", "Buffers retired by clients", None, counted.retired)?;
        counter("farside_reclaimed_buffers", "Reclaimed buffers", None, info.reclaimed_buffers)?;
        counter("farside_scanned_buffers", "Leaked buffers found by scans", None, info.scanned_buffers)?;
        counter("farside_engine_datagrams_in", "Datagrams and frames received", None, through.datagrams_in)?;
        counter("farside_engine_datagrams_out", "Datagrams and frames sent", None, through.datagrams_out)?;
        counter("farside_engine_requests", "Requests executed", None, through.executed)?;
        counter("farside_engine_duplicates", "Duplicate entries", None, through.duplicates)?;
        counter("farside_engine_malformed", "Malformed datagrams", None, through.malformed)?;
        counter("farside_engine_disallowed", "Greetings and entries refused", None, through.refused)?;
        counter("farside_engine_sessions_opened", "Sessions opened", None, through.opened)?;
        counter("farside_engine_sessions_ended", "Sessions ended", None, through.ended)?;
        counter("farside_engine_bad_tokens", "Greetings without a known token", None, refused.bad_tokens)?;
        counter("farside_engine_locked_out", "Greetings from a locked source", None, refused.locked_out)?;
        counter("farside_engine_bad_secrets", "Datagrams with a wrong secret", None, refused.bad_secrets)?;
        counter("farside_engine_wrong_keys", "Chains with a key never given", None, refused.wrong_keys)?;
        counter("farside_engine_refused_chains", "Chains refused by engines", None, refused.chains)?;
        counter("farside_engine_refused_asks", "Requests refused for lack of rights", None, refused.asks)?;
        counter("farside_engine_forged", "Packets not sealed by a known key", None, refused.forged)?;
        counter("farside_engine_replayed", "Sealed packets received again", None, refused.replayed)?;
        let mut gauge = |name, help, unit: Option<&Unit>, value: u64| {
            let metric = ConstGauge::new(value as i64);
            metric.encode(encoder.encode_descriptor(name, help, unit, metric.metric_type())?)
        };
        gauge("farside_memory", "Memory of the node", Some(&Unit::Bytes), info.memory_bytes)?;
        gauge("farside_unassigned", "Memory that no store owns", Some(&Unit::Bytes), info.unassigned_bytes)?;
        gauge("farside_stores", "Stores", None, stores)?;
        gauge("farside_sessions", "Sessions open", None, info.sessions)?;
        gauge("farside_engine_sessions", "Sessions open at engines", None, sessions)?;
        gauge("farside_stopped_clients", "Stopped processes that delay reclamation", None, stopped)?;
        let rows = served.iter().flat_map(|(store, served)| {
            served.report().into_iter().map(move |(name, number)| (store, name, number))
        });
        let mut rows = rows.peekable();
        if rows.peek().is_none() {
            return Ok(());
        }
        let (name, help) = ("farside_store_service", "Numbers of a store's service and of its log");
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (store, name, number) in rows {
            let labels = [("store", store.as_str()), ("name", name)];
            ConstGauge::new(number as i64).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_exact_token_is_accepted() {
        let sends = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().expect("a header"));
            presents(&headers, "secret")
        };
        assert!(sends("Bearer secret") && sends("bearer secret"));
        for wrong in ["Bearer secre", "Bearer secrets", "Bearer Secret", "Bearer ", "Basic secret", "secret"]
        {
            assert!(!sends(wrong), "{wrong}");
        }
        assert!(!presents(&HeaderMap::new(), "secret"));
    }
}
