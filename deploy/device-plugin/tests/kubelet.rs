//! The plugin as a kubelet sees it.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

mod common;

use common::{Daemon, Kubelet, allocate, libraries, plugin, until, within};
use rnic_device_plugin::api::{Empty, HEALTHY, Mount, PreStartContainerRequest, UNHEALTHY};
use tonic::Code;

#[tokio::test]
async fn shares_are_registered_listed_and_allocated() {
    let daemon = Daemon::start();
    let libraries = libraries();
    let mut kubelet = Kubelet::new();
    kubelet.start(None);
    let options = ["--resource", "example.org/rnic", "--shares", "3"];
    let process = plugin(&kubelet, &daemon.socket, libraries.path(), &options);
    let (request, mut client) = kubelet.plugin().await;
    assert_eq!((&*request.version, &*request.resource_name), ("v1beta1", "example.org/rnic"));
    let options = within(client.get_device_plugin_options(Empty {})).await.unwrap().into_inner();
    assert_eq!(Some(options), request.options);
    assert!(!options.pre_start_required && !options.get_preferred_allocation_available);

    let mut stream = within(client.list_and_watch(Empty {})).await.unwrap().into_inner();
    let list = until(&mut stream, HEALTHY).await;
    let ids: Vec<&str> = list.devices.iter().map(|device| &*device.id).collect();
    assert_eq!(ids, ["rnicd-0", "rnicd-1", "rnicd-2"]);

    let reply = allocate(&mut client, &[&["rnicd-2"], &["rnicd-0", "rnicd-1"]]).await.unwrap();
    let [one, two] = &reply.container_responses[..] else { panic!("{reply:?}") };
    assert_eq!(one, two);
    let mount = |to: &str, from: &std::path::Path| Mount {
        container_path: to.to_owned(),
        host_path: from.to_str().unwrap().to_owned(),
        read_only: true,
    };
    let socket = daemon.socket.parent().unwrap();
    let mounts = [mount("/run/rnicd", socket), mount("/usr/lib/rnicd", libraries.path())];
    assert_eq!(one.mounts, mounts);
    let mut variables: Vec<String> =
        one.envs.iter().map(|(name, value)| format!("{name}={value}")).collect();
    variables.sort();
    let in_pod = "/usr/lib/rnicd";
    assert_eq!(
        variables,
        [
            "ASAN_OPTIONS=verify_asan_link_order=0".to_owned(),
            format!(
                "LD_PRELOAD={in_pod}/librnic_preload.so:{in_pod}/libibverbs.so.1:\
                 {in_pod}/librdmacm.so.1"
            ),
            "RNIC_SOCKET=/run/rnicd/rnicd.sock".to_owned(),
            "RNIC_TREE=/run/rnicd/rnicd.sock.tree".to_owned(),
        ]
    );

    for (ids, expected) in [
        (&["rnicd-3"][..], "example.org/rnic has no device \"rnicd-3\""),
        (&["rnicd-0", ""], "has no device \"\""),
        (&["rnicd-00"], "names are rnicd-0 to rnicd-2 (--shares 3)"),
        (&[], "the request names no device of example.org/rnic"),
    ] {
        let error = allocate(&mut client, &[&["rnicd-0"], ids]).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.message().contains(expected), "{error}");
    }
    let request = PreStartContainerRequest::default();
    let error = within(client.pre_start_container(request)).await.unwrap_err();
    assert_eq!(error.code(), Code::Unimplemented);

    // The stream ends with the plugin, which leaves no socket behind.
    assert!(process.terminate().success());
    assert!(!matches!(within(stream.message()).await, Ok(Some(_))));
    assert_eq!(std::fs::read_dir(kubelet.folder.path()).unwrap().count(), 1);
}

#[tokio::test]
async fn health_follows_the_daemon() {
    let daemon = Daemon::start();
    let libraries = libraries();
    let mut kubelet = Kubelet::new();
    kubelet.start(None);
    let _process = plugin(&kubelet, &daemon.socket, libraries.path(), &["--shares", "2"]);
    let (_, mut client) = kubelet.plugin().await;
    let mut stream = within(client.list_and_watch(Empty {})).await.unwrap().into_inner();
    until(&mut stream, HEALTHY).await;
    // A stopped daemon does not answer.
    daemon.process.signal("STOP");
    until(&mut stream, UNHEALTHY).await;
    daemon.process.signal("CONT");
    until(&mut stream, HEALTHY).await;
    let (folder, config) = daemon.ends();
    until(&mut stream, UNHEALTHY).await;
    let error = allocate(&mut client, &[&["rnicd-0"]]).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    let socket = folder.path().join("rnicd.sock");
    assert!(error.message().contains(socket.to_str().unwrap()), "{error}");
    // A second stream starts with the present state.
    let mut second = within(client.list_and_watch(Empty {})).await.unwrap().into_inner();
    until(&mut second, UNHEALTHY).await;
    let _daemon = Daemon::start_in(folder, &config);
    until(&mut stream, HEALTHY).await;
    until(&mut second, HEALTHY).await;
    allocate(&mut client, &[&["rnicd-0"]]).await.unwrap();
}

#[tokio::test]
async fn named_devices_must_exist() {
    let daemon = Daemon::start();
    let libraries = libraries();
    let mut kubelet = Kubelet::new();
    kubelet.start(None);
    let options = ["--devices", "rnicd1,mlx5_0"];
    let mut process = plugin(&kubelet, &daemon.socket, libraries.path(), &options);
    let (_, mut client) = kubelet.plugin().await;
    process.line_with("has no device \"mlx5_0\" (--devices); it has rnicd1, rnicd0");
    let mut stream = within(client.list_and_watch(Empty {})).await.unwrap().into_inner();
    until(&mut stream, UNHEALTHY).await;
    drop((process, stream));
    let _process = plugin(&kubelet, &daemon.socket, libraries.path(), &["--devices", "rnicd1"]);
    let (_, mut client) = kubelet.plugin().await;
    let mut stream = within(client.list_and_watch(Empty {})).await.unwrap().into_inner();
    until(&mut stream, HEALTHY).await;
    let reply = allocate(&mut client, &[&["rnicd-0"]]).await.unwrap();
    assert_eq!(reply.container_responses[0].envs["RNIC_DEVICES"], "rnicd1");
}

#[tokio::test]
async fn plugin_registers_with_each_new_kubelet() {
    let daemon = Daemon::start();
    let libraries = libraries();
    let mut kubelet = Kubelet::new();
    // Without a kubelet the plugin waits.
    let mut process = plugin(&kubelet, &daemon.socket, libraries.path(), &[]);
    process.line_with("waiting for the kubelet");
    for _ in 0..3 {
        kubelet.start(None);
        let (request, mut client) = kubelet.plugin().await;
        assert_eq!(request.resource_name, "rdma/hca_shared_devices_a");
        let mut stream = within(client.list_and_watch(Empty {})).await.unwrap().into_inner();
        assert_eq!(until(&mut stream, HEALTHY).await.devices.len(), 63);
        kubelet.stop();
    }
    assert!(process.terminate().success());
}

#[tokio::test]
async fn refusals_of_the_kubelet_end_the_plugin() {
    let daemon = Daemon::start();
    let libraries = libraries();
    let mut kubelet = Kubelet::new();
    kubelet.start(Some("the resource name is taken"));
    let process = plugin(&kubelet, &daemon.socket, libraries.path(), &[]);
    let (status, text) = tokio::task::spawn_blocking(|| process.finish()).await.unwrap();
    assert_eq!(status.code(), Some(1), "{text}");
    let expected = "refuses rdma/hca_shared_devices_a (--resource): the resource name is taken";
    assert!(text.contains(expected), "{text}");
}

#[tokio::test]
async fn missing_libraries_end_the_plugin() {
    let kubelet = Kubelet::new();
    let empty = common::folder();
    let process = plugin(&kubelet, &empty.path().join("rnicd.sock"), empty.path(), &[]);
    let (status, text) = process.finish();
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(text.contains("has no libibverbs.so.1; set --lib-dir"), "{text}");
}
